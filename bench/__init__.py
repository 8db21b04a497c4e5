"""Measurements that are run by hand: each package or module here is one."""
