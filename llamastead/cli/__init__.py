"""The `llamastead` command."""
