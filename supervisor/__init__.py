"""Supervisor: every decision, the registry, the instances."""
