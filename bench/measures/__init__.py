"""What `bench/compare.py` and `bench/pace.py` measure, and how they show it.

- compare: `settings` of passes, `contests` with torch, `overlap`, `report`
- pace: `paced_device`, `timed_model`, `gradient_norms`, `pacing`, `pacing_report`
- both: `options`
"""
