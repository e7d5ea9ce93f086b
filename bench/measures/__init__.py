"""What `bench/compare.py` and `bench/pace.py` measure, and how they show it.

- compare: `contests` with `peers`, `overlap`, `report`; `bench/step_cost.py` makes a page of it
- pace: `paced_device`, `timed_model`, `gradient_norms`, `pacing`, `pacing_report`
- both: `options`, `threads`
"""
