"""Python loads this module first in every process of an engine, whose ``PYTHONPATH`` begins here.

vLLM's processes wait for each other by ``sched_yield``. Linux 6.18 then keeps others from a core for
30 s at a time, where cores are fewer than those that wait. A sleep of no time does not do that.
"""

import os
import time
from functools import partial

os.sched_yield = partial(time.sleep, 0)
