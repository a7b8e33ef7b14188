"""``tiered bench``: measures drives, stores, optimizer steps and trainings."""
