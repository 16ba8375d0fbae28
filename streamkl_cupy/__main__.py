"""`python -m streamkl_cupy`: the main job, see demo.py."""

from .demo import main

raise SystemExit(main())
