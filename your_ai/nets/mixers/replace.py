"""Make mlx-lm's mixers compute in chunks where they train, and as ever where they generate.

Attention is one of them: it attends in blocks of queries, where that is better; with a TileCache,
it hands its queries, keys and values over.

A mixer becomes an instance of a subclass of its class, with the same attributes. The methods of
the subclass are the class's own, but call the functions of this package in place of mlx-lm's
loops. With a cache, the class's own methods run.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.memory.sizes import LEAN_QUERY_BLOCK
from your_ai.nets.attention import attention, needs_blocks
from your_ai.nets.block_calls import Mask, TextMask
from your_ai.nets.mixers.gated_delta import by_mlx, gated_delta, log_decays, uses_mlx
from your_ai.nets.mixers.linear_attention import linear_attention, state_space, step_sizes
from your_ai.nets.mixers.rwkv7 import rwkv7
from your_ai.nets.mixers.scans import convolution, real_gated_lru, selective_scan
from your_ai.nets.numerics import device, mlx_version
from your_ai.nets.tiled_attention import TileCache

MODELS = "mlx_lm.models."
Update = Callable[..., tuple[mx.array, mx.array]]  # -> the output, the last state


def replace_mixers(module: nn.Module) -> int:
    """Replace the known mixers below `module`, in place; return their number."""
    count = 0
    for name, child in list(module.items()):
        if _is_mixer(child):
            module[name] = _chunked(child)
            count += 1
        else:
            leaves = tree_flatten(child, is_leaf=lambda leaf: isinstance(leaf, nn.Module))
            count += sum(replace_mixers(leaf) for _, leaf in leaves if isinstance(leaf, nn.Module))
    return count


def _is_mixer(module: Any) -> bool:
    """Return whether a module has a known loop, or mixes by a convolution of each channel."""
    if not isinstance(module, nn.Module) or not type(module).__module__.startswith(MODELS):
        return False
    if _place_of_cache(type(module)) is None:
        return False
    return bool(_methods(type(module))) or any(map(_is_convolution, module.values()))


def _is_convolution(module: Any) -> bool:
    """Return whether a module is a convolution of each channel with its own weights, unpadded."""
    if _name(type(module)) == "recurrent_gemma.Conv1d":
        return True
    return type(module) is nn.Conv1d and (
        (module.groups, module.stride, module.padding, module.dilation)
        == (module.weight.shape[0], 1, 0, 1)
        and module.weight.shape[2] == 1
    )


def _is_replaced(module: Any) -> bool:
    return hasattr(type(module), "chunked_from")


def _chunked(module: nn.Module) -> nn.Module:
    """A copy of a mixer that computes in chunks, as do the mixers and convolutions in it."""
    twin = copy.copy(module)
    for name, child in module.items():
        if isinstance(child, nn.Module):
            twin[name] = _chunked(child)
    if _is_mixer(module) or _is_convolution(module):
        twin.__class__ = chunked_class(type(module))
    return twin


def _original(module: nn.Module) -> nn.Module:
    """A view of a mixer as its own class; it shares the attributes, but not the children."""
    children = {n: _original(c) if isinstance(c, nn.Module) else c for n, c in module.items()}
    if not _is_replaced(module) and all(child is module[n] for n, child in children.items()):
        return module
    kind = getattr(type(module), "chunked_from", type(module))
    view: nn.Module = kind.__new__(kind)
    object.__setattr__(view, "__dict__", vars(module))
    dict.update(view, children)
    return view


@lru_cache
def chunked_class(kind: type) -> type:
    """The subclass of a mixer's class that computes in chunks."""
    methods = _methods(kind)
    place = _place_of_cache(kind)
    if place is not None:
        call = methods.get("__call__", kind.__call__)

        def __call__(self: nn.Module, *args: Any, **keywords: Any) -> Any:
            cache = args[place] if place < len(args) else keywords.get("cache")
            if cache is None or isinstance(cache, TileCache):
                return call(self, *args, **keywords)
            return kind.__call__(_original(self), *args, **keywords)

        methods["__call__"] = __call__
    return type(f"Chunked{kind.__name__}", (kind,), {**methods, "chunked_from": kind})


def _place_of_cache(kind: type) -> int | None:
    """The place of the argument `cache` of a layer, or None if it has none."""
    names = list(inspect.signature(kind.__call__).parameters)
    return names.index("cache") - 1 if "cache" in names else None


def _unchanged(kind: type) -> dict[str, FunctionType]:
    """The functions of a class and its bases in mlx-lm, by name."""
    found: dict[str, FunctionType] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith(MODELS):
            found |= {n: f for n, f in vars(base).items() if isinstance(f, FunctionType)}
    return found


def _methods(kind: type) -> dict[str, Callable[..., Any]]:
    """The methods that differ in the subclass of a mixer's class; none if it has no known loop."""
    found: dict[str, Callable[..., Any]] = {}
    for name, function in _unchanged(kind).items():
        own = {
            called: make(function.__globals__[called])
            for called, make in FUNCTIONS.items()
            if called in function.__code__.co_names and _is_of_mlx_lm(function, called)
        }
        if own:
            found[name] = _with_globals(function, own)
    return found | METHODS.get(_name(kind), {})


def _is_of_mlx_lm(function: FunctionType, name: str) -> bool:
    called = function.__globals__.get(name)
    return isinstance(called, FunctionType) and called.__module__.startswith(MODELS)


def _with_globals(function: FunctionType, own: dict[str, Callable[..., Any]]) -> FunctionType:
    """The same code, with other functions behind some of the names that it calls."""
    given = {**function.__globals__, **own}
    twin = FunctionType(
        function.__code__, given, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _name(kind: type) -> str:
    """e.g. mamba.MambaBlock"""
    return f"{kind.__module__.removeprefix(MODELS)}.{kind.__name__}"


# -- functions of mlx-lm ------------------------------------------------------------------

# Each of these makes, from mlx-lm's function, one with its signature that computes in chunks
# from no state, and calls mlx-lm's with a state, a mask or lengths.


def _gated_delta_update(original: Update) -> Update:
    def run(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        A_log: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
        *,
        lower_bound: float | None = None,
        allow_neg_eigval: bool = False,
        **more: Any,
    ) -> tuple[mx.array, mx.array]:
        if state is not None or mask is not None:
            more |= {"lower_bound": lower_bound, "allow_neg_eigval": allow_neg_eigval}
            return original(q, k, v, a, b, A_log, dt_bias, state, mask, **more)
        beta = mx.sigmoid(b) * (2.0 if allow_neg_eigval else 1.0)
        logs = log_decays(a, A_log, dt_bias, lower_bound)
        by = by_mlx if uses_mlx(device(), mlx_version(), logs.ndim == 3) else gated_delta
        return by(q, k, v, logs, beta)

    return run


def _ssm_update(original: Update) -> Update:
    def run(
        hidden_states: mx.array,
        A_log: mx.array,
        B: mx.array,
        C: mx.array,
        D: mx.array,
        dt: mx.array,
        dt_bias: mx.array,
        state: mx.array | None = None,
        time_step_limit: tuple[float, float] = (0.001, 100.0),
        mask: mx.array | None = None,
        lengths: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        if state is not None or mask is not None or lengths is not None:
            limits = (state, time_step_limit, mask, lengths)
            return original(hidden_states, A_log, B, C, D, dt, dt_bias, *limits)
        dt = step_sizes(dt, dt_bias, time_step_limit)
        logs = -dt * mx.exp(A_log.astype(mx.float32))
        return state_space(hidden_states, B, C, D, dt, logs)

    return run


def _recurrent_gla(original: Update) -> Update:
    def run(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        scale: float,
        h: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        if h is not None or mask is not None:
            more = {} if mask is None else {"mask": mask}
            return original(q, k, v, g, scale=scale, h=h, **more)
        queries, keys, values = (x.swapaxes(1, 2) for x in (q, k, v))
        logs = mx.broadcast_to(g.astype(mx.float32), queries.shape[:3])
        y, state = linear_attention(queries * scale, keys, values, logs)
        return y.swapaxes(1, 2).astype(q.dtype), state.swapaxes(-1, -2)

    return run


def _rnn_scan(original: Update) -> Update:
    def run(x: mx.array, a: mx.array, h0: mx.array | None) -> tuple[mx.array, mx.array]:
        return real_gated_lru(x, a) if h0 is None else original(x, a, h0)

    return run


def _attend(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def run(
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        if isinstance(cache, TileCache):
            return cache.attend(queries, keys, values, scale, mask, sinks)
        tokens, seen = queries.shape[2], Mask()
        if isinstance(mask, TextMask):
            mask.received.append(True)
            seen = mask.mask
        packed, known = seen.segments is not None, isinstance(scale, (int, float))
        causal = isinstance(mask, str) and mask == "causal" and keys.shape[2] == tokens and known
        if causal and needs_blocks(device(), mlx_version(), tokens, packed, seen.reach):
            more = (seen.window, seen.segments, LEAN_QUERY_BLOCK, sinks, seen.chunk)
            return attention(queries, keys, values, scale, *more)
        mask = seen.array(tokens) if isinstance(mask, TextMask) and not causal else mask
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return run


FUNCTIONS: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "scaled_dot_product_attention": _attend,
    "gated_delta_update": _gated_delta_update,
    "ssm_update": _ssm_update,
    "recurrent_gla": _recurrent_gla,
    "rnn_scan": _rnn_scan,
}


# -- methods of mlx-lm --------------------------------------------------------------------

# They have no cache: with one, the class's own methods run.


def _mamba_sequence(self: Any, x: mx.array, conv_cache: None, state_cache: None) -> Any:
    """(B, T, D) -> (B, T, D), and the states that a cache would keep."""
    x, gate = self.in_proj(x).split(2, axis=-1)
    padded = mx.pad(x, [(0, 0), (self.conv_kernel_size - 1, 0), (0, 0)])
    x = nn.silu(self.conv1d(padded))
    rank = self.time_step_rank
    delta, B, C = mx.split(self.x_proj(x), [rank, rank + self.ssm_state_size], axis=-1)
    if self.use_bcdt_rms:
        eps = self.args.mixer_rms_eps
        delta, B, C = (mx.fast.rms_norm(y, weight=None, eps=eps) for y in (delta, B, C))
    delta = nn.softplus(self.dt_proj(delta))
    A = -mx.exp(self.A_log)
    y, state = selective_scan(x, delta, A, B, C, self.D)
    return self.out_proj(nn.silu(gate) * y), (padded[:, 1 - self.conv_kernel_size :], state)


def _jamba_step(self: Any, x: mx.array, A: mx.array, state: None = None) -> Any:
    """(B, T, D) -> (B, T, D), and the last state."""
    rank = self.time_step_rank
    delta, B, C = mx.split(self.x_proj(x), [rank, rank + self.ssm_state_size], axis=-1)
    delta, B, C = self.dt_layernorm(delta), self.b_layernorm(B), self.c_layernorm(C)
    return selective_scan(x, nn.softplus(self.dt_proj(delta)), A, B, C, self.D)


def _wkv7(
    self: Any,
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: None,
) -> tuple[mx.array, mx.array]:
    return rwkv7(r, w, k, v, a, b)


def _convolve(self: Any, x: mx.array) -> mx.array:
    """(B, n + K - 1, C) -> (B, n, C)"""
    y = convolution(x, self.weight)
    return y + self.bias if "bias" in self else y


def _convolve_padded(self: Any, x: mx.array, cache: None = None) -> tuple[mx.array, mx.array]:
    """(B, T, C) -> (B, T, C), and the inputs that a cache would keep."""
    K = self.weight.shape[1]
    padded = mx.pad(x, [(0, 0), (K - 1, 0), (0, 0)])
    return convolution(padded, self.weight) + self.bias, padded[:, 1 - K :]


METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "mamba.MambaBlock": {"_process_sequence": _mamba_sequence},
    "jamba.JambaMambaMixer": {"ssm_step": _jamba_step},
    "rwkv7.Rwkv7TimeMixing": {"_wkv7": _wkv7},
    "recurrent_gemma.Conv1d": {"__call__": _convolve_padded},
    _name(nn.Conv1d): {"__call__": _convolve},
}
