"""RQ worker: jobs that take long and must not sit in the supervisor."""
