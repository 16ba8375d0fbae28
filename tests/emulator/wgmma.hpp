// wgmma: products of a warpgroup.
//
// A thread's n-th wgmma is its share of the warpgroup's n-th product. Products queue up and are made, in their order, while threads
// wait for them, all 128 having issued them: like boxes, when no thread can run any more, or earlier. Operands in shared memory and
// in registers are read only then. Accumulators are NaN from the issue until their own thread has waited.
#pragma once

#include "mbarriers.hpp"

namespace emulated {

constexpr int kWarpgroup = 128;
constexpr unsigned kPoison = 0xffffffffu;
constexpr char kWgmmaWait[] = "wgmma_wait";

// The accumulators of one or more products, while they are out of the threads' reach.
struct Accumulators {
  int n;
  float* registers[kWarpgroup];
  bool returned[kWarpgroup];
  int last[kWarpgroup];  // number of the last product that the thread issued on them
  int threads_returned;
  std::vector<float> values;  // 64 rows of n
};

struct Instruction {
  int n;
  bool bfloat16, from_registers, transposed_a, transposed_b, accumulate;
  u64 a, b;
  bool operator==(const Instruction& o) const {
    return n == o.n && bfloat16 == o.bfloat16 && from_registers == o.from_registers && transposed_a == o.transposed_a &&
           transposed_b == o.transposed_b && accumulate == o.accumulate && a == o.a && b == o.b;
  }
};

struct Product {
  Instruction instruction;
  Accumulators* accumulators;
  int issued;  // by how many threads
  const u32* fragments[kWarpgroup];
};

struct Warpgroup {
  std::vector<Product> queue;  // `made` of the products are no longer in it
  int made;
  std::vector<int> group_ends;  // how many products had been issued at each commit
  std::vector<std::unique_ptr<Accumulators>> accumulators;
  std::vector<Thread*> waiting;
  int registers;  // a thread, by setmaxnreg; 0: as launched
};

struct WgmmaThread {
  int issued, groups, completed;  // products, commits, products waited for
  int needs;                      // how many products it waits for
  bool fenced;
};

struct WgmmaState {
  std::vector<Warpgroup> warpgroups;
  std::vector<WgmmaThread> threads;
};
inline WgmmaState wgmma_state;
inline WgmmaState parked_wgmma_state;  // of the parked block

inline void exchange_wgmma() {
  std::swap(hopper, parked_hopper);
  std::swap(wgmma_state, parked_wgmma_state);
}

inline Warpgroup& warpgroup() { return wgmma_state.warpgroups[thread_number() / kWarpgroup]; }
inline WgmmaThread& wgmma_thread() { return wgmma_state.threads[thread_number()]; }
inline int rank() { return thread_number() % kWarpgroup; }

// Element i of a thread's accumulators.
inline int accumulator_row(int rank, int i) { return 16 * (rank / 32) + rank % 32 / 4 + 8 * (i / 2 % 2); }
inline int accumulator_column(int rank, int i) { return 8 * (i / 4) + 2 * (rank % 4) + i % 2; }

inline Accumulators* take_accumulators(Warpgroup& w, int n, float* d) {
  for (auto& a : w.accumulators) {
    if (a->registers[rank()] != d || a->returned[rank()]) continue;
    if (a->n != n) fail("wgmma with n = %d on accumulators that are in flight with n = %d", n, a->n);
    return a.get();
  }
  auto fresh = std::make_unique<Accumulators>(Accumulators{n, {}, {}, {}, 0, std::vector<float>(64 * n)});
  w.accumulators.push_back(std::move(fresh));
  return w.accumulators.back().get();
}

inline void issue_wgmma(const Instruction& instruction, float* d, const u32* fragments) {
  WgmmaThread& t = wgmma_thread();
  if (thread_number() / kWarpgroup >= static_cast<int>(wgmma_state.warpgroups.size())) fail("wgmma by less than a warpgroup");
  Warpgroup& w = warpgroup();
  if (!t.fenced) fail("wgmma without a wgmma_fence since the last wgmma_wait");
  const int number = t.issued++, me = rank();
  if (number - w.made == static_cast<int>(w.queue.size())) w.queue.push_back({instruction, take_accumulators(w, instruction.n, d), 0, {}});
  Product& p = w.queue[number - w.made];
  if (!(p.instruction == instruction)) fail("wgmma number %d differs from that of other threads of the warpgroup: shape, descriptor or predicate", number);
  Accumulators& a = *p.accumulators;
  if (a.registers[me] == nullptr) {
    a.registers[me] = d;
    for (int i = 0; i < a.n / 2; ++i) {
      a.values[accumulator_row(me, i) * a.n + accumulator_column(me, i)] = d[i];
      std::memcpy(d + i, &kPoison, 4);
    }
  }
  if (a.registers[me] != d) fail("wgmma number %d: other threads of the warpgroup give other accumulators", number);
  a.last[me] = number;
  p.fragments[me] = fragments;
  ++p.issued;
}

inline void commit_wgmma() {
  Warpgroup& w = warpgroup();
  WgmmaThread& t = wgmma_thread();
  if (t.groups == static_cast<int>(w.group_ends.size())) w.group_ends.push_back(t.issued);
  if (w.group_ends[t.groups] != t.issued) fail("wgmma_commit number %d after %d products, and other threads' after %d", t.groups, t.issued, w.group_ends[t.groups]);
  ++t.groups;
}

struct Operand {
  unsigned start, leading, stride;
  explicit Operand(u64 descriptor)
      : start((descriptor & 0x3fff) << 4), leading((descriptor >> 16 & 0x3fff) << 4), stride((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) fail("wgmma: only the 128-byte swizzle is emulated, and the descriptor is %016llx", descriptor);
    if ((descriptor >> 49 & 7) != 0 || start % 1024 / 128 != 0)
      fail("wgmma: an operand at shared address %u; only those that start in the first of eight rows are emulated", start);
  }
};

template <typename Element>
inline void read_elements(unsigned address, float (&values)[8]) {
  const unsigned at = swizzled(address);
  if (at + 16ull > block.shared_bytes) fail("wgmma: an operand reaches shared address %u of %u", at, block.shared_bytes);
  check_fenced("wgmma", at);
  Element elements[8];
  std::memcpy(elements, block.shared + at, 16);
  for (int i = 0; i < 8; ++i) values[i] = to_float(elements[i]);
}

// An operand as `count` rows by 16 summed columns, or their transpose: put(row, column, value).
template <typename Element, typename Put>
inline void read_operand(u64 descriptor, bool transposed, int count, const Put& put) {
  const Operand o(descriptor);
  float values[8];
  if (transposed) {
    for (int k = 0; k < 16; ++k) {
      for (int row = 0; row < count; row += 8) {
        read_elements<Element>(o.start + row / 64 * o.leading + k / 8 * o.stride + k % 8 * 128 + row % 64 * 2, values);
        for (int i = 0; i < 8; ++i) put(row + i, k, values[i]);
      }
    }
  } else {
    for (int row = 0; row < count; ++row) {
      for (int k = 0; k < 16; k += 8) {
        read_elements<Element>(o.start + row / 8 * o.stride + row % 8 * 128 + k * 2, values);
        for (int i = 0; i < 8; ++i) put(row, k + i, values[i]);
      }
    }
  }
}

template <typename Element>
inline void make(const Product& p) {
  const Instruction& in = p.instruction;
  static float left[64][16];
  alignas(32) static float right[16][256];
  if (in.from_registers) {
    for (int thread = 0; thread < kWarpgroup; ++thread) {
      for (int i = 0; i < 4; ++i) {
        for (int high = 0; high < 2; ++high)
          left[accumulator_row(thread, 2 * i)][2 * (thread % 4) + high + 8 * (i / 2)] = to_float(Element{half_of(p.fragments[thread][i], high)});
      }
    }
  } else {
    read_operand<Element>(in.a, in.transposed_a, 64, [](int row, int k, float value) { left[row][k] = value; });
  }
  read_operand<Element>(in.b, in.transposed_b, in.n, [](int row, int k, float value) { right[k][row] = value; });
  for (int row = 0; row < 64; ++row) {
    for (int column = 0; column < in.n; column += 8) {
      float* const to = &p.accumulators->values[row * in.n + column];
      Row total = {};
      if (in.accumulate) std::memcpy(&total, to, sizeof total);
      for (int k = 0; k < 16; ++k) total += left[row][k] * *reinterpret_cast<const Row*>(&right[k][column]);
      std::memcpy(to, &total, sizeof total);
    }
  }
}

// How many products must be made to let somebody go on, or 0 where not all threads have issued them or nobody waits.
inline int next_end(const Warpgroup& w) {
  int end = 0;
  for (const Thread* t : w.waiting) {
    const int needs = wgmma_state.threads[t - block.threads.data()].needs;
    if (end == 0 || needs < end) end = needs;
  }
  return end > w.made && w.queue[end - w.made - 1].issued == kWarpgroup ? end : 0;
}
inline void make_until(Warpgroup& w, int end) {
  for (; w.made < end; ++w.made) {
    const Product& p = w.queue.front();
    p.instruction.bfloat16 ? make<BFloat16>(p) : make<Half>(p);
    w.queue.erase(w.queue.begin());
  }
  wake_all(w.waiting);
}

// Lets one thing that is in flight take place; false where nothing is.
inline bool advance() {
  std::vector<Warpgroup*> ready;
  for (Warpgroup& w : wgmma_state.warpgroups) {
    if (next_end(w) != 0) ready.push_back(&w);
  }
  const unsigned copies = static_cast<unsigned>(hopper.copies.size()), all = copies + static_cast<unsigned>(ready.size());
  if (all == 0) return false;
  // Where nothing is early, products take place first, and of the boxes the oldest one arrives last.
  const unsigned last = ready.empty() ? copies - 1 : copies + random_below(static_cast<unsigned>(ready.size()));
  const unsigned which = hopper.patience == 0 ? last : random_below(all);
  if (which < copies) land_number(which);
  else make_until(*ready[which - copies], next_end(*ready[which - copies]));
  return true;
}

inline int next_warp(int warp) {
  if (hopper.patience != 0 && random_below(hopper.patience) == 0) advance();
  return random_below(2) == 0 ? warp : static_cast<int>(random_below(static_cast<unsigned>(block.warps.size())));
}

// Gives the thread its accumulators back.
inline void give_back(Accumulators& a, int thread) {
  float* const d = a.registers[thread];
  for (int i = 0; i < a.n / 2; ++i) {
    if (__float_as_uint(d[i]) != kPoison) fail("accumulator %d was overwritten while a wgmma on it was in flight", i);
    d[i] = a.values[accumulator_row(thread, i) * a.n + accumulator_column(thread, i)];
  }
  a.returned[thread] = true;
  ++a.threads_returned;
}

inline void wait_wgmma(int pending_groups) {
  Warpgroup& w = warpgroup();
  WgmmaThread& t = wgmma_thread();
  const int groups = t.groups - pending_groups, me = rank();
  t.fenced = false;
  if (groups <= 0) return;
  const int end = t.needs = w.group_ends[groups - 1];
  while (w.made < end) {
    w.waiting.push_back(block.current);
    wait_at(kWgmmaWait);
  }
  t.completed = std::max(t.completed, end);
  for (std::size_t i = 0; i < w.accumulators.size(); ++i) {
    Accumulators& a = *w.accumulators[i];
    if (a.registers[me] != nullptr && !a.returned[me] && a.last[me] < end) give_back(a, me);
    if (a.threads_returned == kWarpgroup) w.accumulators.erase(w.accumulators.begin() + i--);
  }
}

// Registers a thread that the block was launched with, as with __launch_bounds__(threads, 1).
inline int registers_at_launch() { return 65536 / static_cast<int>(block.threads.size()) / 8 * 8; }

inline void set_registers(int registers) {
  if (registers % 8 != 0 || registers < 24 || registers > 256) fail("setmaxnreg to %d: a multiple of 8 from 24 to 256", registers);
  warpgroup().registers = registers;
}

inline void check_registers() {
  int all = 0;
  for (const Warpgroup& w : wgmma_state.warpgroups) all += kWarpgroup * (w.registers == 0 ? registers_at_launch() : w.registers);
  const int there = static_cast<int>(block.threads.size()) * registers_at_launch();
  if (all > there) fail("the warpgroups take %d registers, and the block was launched with %d", all, there);
}

inline void begin_wgmma() {
  begin_hopper();
  wgmma_state.warpgroups.clear();
  wgmma_state.warpgroups.resize(block.threads.size() / kWarpgroup);
  wgmma_state.threads.assign(block.threads.size(), WgmmaThread());
}
inline void leave_wgmma() {
  leave_hopper();
  const WgmmaThread& t = wgmma_thread();
  if (t.issued > t.completed) fail("it returns without having waited for %d wgmmas", t.issued - t.completed);
  if (block.live == 1) check_registers();
}
inline std::string wgmma_detail(const Thread& t) {
  if (t.waits_at != kWgmmaWait) return mbarrier_detail(t);
  const int first = (&t - block.threads.data()) / kWarpgroup * kWarpgroup, mine = wgmma_state.threads[&t - block.threads.data()].issued;
  for (int i = first; i < first + kWarpgroup; ++i) {
    if (wgmma_state.threads[i].issued < mine)
      return ", and lane " + std::to_string(i % kLanes) + " of warp " + std::to_string(i / kLanes) + " has not issued the wgmmas";
  }
  return "";
}

}  // namespace emulated
