"""Hand-made DLPack producers: capsules whose every field a test chooses, with a deleter that counts its calls."""

import ctypes

import numpy as np

_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_api.PyCapsule_IsValid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_api.PyCapsule_GetPointer.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p

DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
CODES = {"f": 2, "i": 0, "u": 1, "V": 4}


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", DELETER))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", DELETER),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


_exported = {}
"""What capsules point at, until their deleters are called. Not kept by the producers: the collector may take one, in a cycle with
its capsule, before the capsule."""


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _destroy(capsule):
    """What producers do with a capsule that nobody consumed."""
    for name, struct in ((b"dltensor", Managed), (b"dltensor_versioned", Versioned)):
        if _api.PyCapsule_IsValid(capsule, name):
            address = _api.PyCapsule_GetPointer(capsule, name)
            struct.from_address(address).deleter(address)


class Legacy:
    """A producer from before DLPack 1.0: `__dlpack__` knows no max_version, contiguous arrays have no strides."""

    struct, name = Managed, b"dltensor"

    def __init__(self, array, device=(1, 0), byte_offset=0, null_strides=False):
        self.array, self.device, self.byte_offset, self.null_strides = array, device, byte_offset, null_strides
        self.exports, self.deleted, self.streams = set(), 0, []

    @property
    def shape(self):
        return self.array.shape

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, *, stream=None):
        self.streams.append(stream)
        return self.export()

    def export(self, **fields):
        a = self.array
        managed = self.struct(**fields)
        t = managed.tensor
        t.data, t.byte_offset = a.__array_interface__["data"][0] - self.byte_offset, self.byte_offset
        t.device_type, t.device_id = self.device
        t.ndim, t.code, t.bits, t.lanes = a.ndim, CODES[a.dtype.kind], 8 * a.itemsize, 1
        shape = (ctypes.c_int64 * a.ndim)(*a.shape)
        strides = (ctypes.c_int64 * a.ndim)(*(s // a.itemsize for s in a.strides))
        t.shape = ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64))
        t.strides = None if self.null_strides else ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64))
        managed.deleter = DELETER(self.delete)
        address = ctypes.addressof(managed)
        _exported[address] = (managed, shape, strides)
        self.exports.add(address)
        return _api.PyCapsule_New(address, self.name, ctypes.cast(_destroy, ctypes.c_void_p))

    def delete(self, address):
        del _exported[address]
        self.exports.remove(address)
        self.deleted += 1


class ReadOnly(Legacy):
    """A producer of DLPack 1.x whose array must not be written."""

    struct, name = Versioned, b"dltensor_versioned"
    version, flags = (1, 0), 1

    def __dlpack__(self, *, stream=None, max_version=None):
        assert max_version == (1, 0)
        self.streams.append(stream)
        return self.export(major=self.version[0], minor=self.version[1], flags=self.flags)


def bfloat16(array):
    import ml_dtypes

    return np.asarray(array).astype(ml_dtypes.bfloat16)
