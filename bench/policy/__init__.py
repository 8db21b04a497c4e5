"""How well a scheduling policy does: arrival traces replayed in virtual time, ours beside two others.

`python -m bench.policy` prints a table and the verdicts; it ends with 1 if one of them is no.
"""
