"""Tiers: they allocate slots of device memory, host memory and disks, and move nothing."""
