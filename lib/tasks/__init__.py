"""The tasks, one file each, and their registry."""

from lib.tasks.single_location import SingleLocation

TASKS = (SingleLocation,)
