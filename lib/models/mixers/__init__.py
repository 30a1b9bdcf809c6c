"""Ways to mix tokens other than attention, one file each, and their registry.

Every module has, for h the normalised residual stream (member, batch, position, model) and a block's own parameters,
    shapes(config, task)            name -> shape of one member's parameters, (in, out) for a matrix
    init(name, shape, keys)         initial values (member, *shape) from the streams `keys`; None: as torch.nn.Linear
    mix(config, block, h)           what is added to the residual stream, (member, batch, position, model)
    mix_sequential(config, block, h)  the same by a plain loop over time: the definition that `mix` is tested against
All are strictly causal but for `mlp_mixer_unmasked`, the control that reads ahead.
"""

from lib.models.mixers import gated_deltanet, linear_rnn, mamba, mlp_mixer, rwkv, xlstm

MIXERS = {
    "mlp_mixer": mlp_mixer,
    "mlp_mixer_unmasked": mlp_mixer,
    "linear_rnn": linear_rnn,
    "mamba": mamba,
    "gated_deltanet": gated_deltanet,
    "rwkv": rwkv,
    "xlstm": xlstm,
}


def check(config) -> None:
    """Raise ValueError for a parameter of the model that its mixer would ignore or contradict."""
    name, unmasked = config.mixer, config.mixer == "mlp_mixer_unmasked"
    if config.state != type(config).model_fields["state"].default and name != "mamba":
        raise ValueError(f"state: mixer {name} has none; leave it out or set mixer = 'mamba'")
    if name == "attention":
        return
    if config.score_bias:
        raise ValueError(f"score_bias: mixer {name} has no attention scores; set score_bias = 0 or mixer = 'attention'")
    if config.causal == unmasked:
        kind, value = ("reads ahead", "false") if unmasked else ("is causal", "true")
        raise ValueError(f"causal: mixer {name} {kind}; set causal = {value}")
    if config.head_dim and name not in ("gated_deltanet", "xlstm"):
        raise ValueError(f"head_dim: mixer {name} has no head dimension of its own; leave it out")
    if name in ("gated_deltanet", "xlstm") and config.attention_width == config.heads:
        raise ValueError(f"heads: mixer {name} normalises each head, and a head of dimension 1 has only a sign; use fewer heads")
