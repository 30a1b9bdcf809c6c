"""The tasks, one file each, and their registry."""

from lib.tasks.associative_recall import AssociativeRecall
from lib.tasks.cellular_automaton import CellularAutomaton
from lib.tasks.language import Language
from lib.tasks.linear_map import LinearMap
from lib.tasks.single_location import SingleLocation

TASKS = (SingleLocation, AssociativeRecall, LinearMap, CellularAutomaton, Language)
