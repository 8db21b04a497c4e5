"""The pure part of the supervisor: no I/O, no clock."""
