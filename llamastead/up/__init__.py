"""`llamastead up`: starts the herd's processes, keeps them running, and ends them in order."""
