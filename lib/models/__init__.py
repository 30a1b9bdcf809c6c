"""The models, one file each, and their registry. Every parameter and activation has a leading `member` axis."""

from lib.models.toy import Toy
from lib.models.transformer import Transformer

MODELS = (Toy, Transformer)
