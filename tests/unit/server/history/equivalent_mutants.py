"""Mutants of server/heads that are no faults: file, a pattern that finds their descriptions, and why no caller can tell.

A line serves as long as its pattern fits what schemata.py calls the change.
"""

EQUIVALENT = []
