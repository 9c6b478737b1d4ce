"""Writes a model's layers as pseudo-code, which shows what a row of the family table means."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby, pairwise

from sglang_lite.runtime.models.spec import (
    AttentionSpec,
    BlockSpec,
    ConvSpec,
    DeltaSpec,
    DenseSpec,
    DepthSpec,
    ExpertsSpec,
    LatentSpec,
    LayerSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MlstmSpec,
    ModelSpec,
    RgLruSpec,
    RopeSpec,
    WkvSpec,
)

_COMMENTS_AT = 64  # column


def pseudo_code(spec: ModelSpec) -> Iterator[str]:
    """Yields the lines of a model's pseudo-code, with each kind of layer only once."""
    yield _format_line(
        0,
        f"# {spec.architecture}: {len(spec.layers)} layers, hidden states of {spec.hidden_size:,}",
    )
    scale = "" if spec.embedding_scale == 1 else f" * {spec.embedding_scale:.4g}"
    yield _format_line(0, f"x = embedding[token]{scale}", f"{spec.vocab_size:,} tokens")
    if spec.learned_positions:
        yield _format_line(
            0, "x = x + position_table[position]", f"{spec.learned_positions:,} positions"
        )
    if spec.embedding_norm:
        yield _format_line(0, f"x = {spec.norm}_norm(x)", _norm_notes(spec))
    if spec.embedding_weights:
        yield _format_line(0, "x = (x + shift) * factor", "learnt vectors")
    if spec.layer_input_tokens:
        yield _format_line(
            0,
            f"inputs = ({spec.norm}_norm(x @ Wi) + table[token]) / sqrt(2)",
            f"{spec.layers[0].input_size} for each layer, {spec.layer_input_tokens:,} tokens",
        )
    for layer, numbers in _group_equal_layers(tuple(map(_without_slopes, spec.layers))):
        yield _format_line(0, f"for layer in {_ranges(numbers)}:")
        for text, comment in _layer_lines(spec, layer):
            yield _format_line(1, text, comment)
    yield _format_line(0, f"x = {spec.norm}_norm(x)", _norm_notes(spec))
    head = "embedding.T" if spec.tied_embeddings else "head"
    logits = f"x @ {head}{' + bias' if spec.head_bias else ''}"
    if spec.logit_scale != 1:
        logits = f"({logits}) * {spec.logit_scale:.4g}"
    yield _format_line(0, f"logits = {_apply_softcap(logits, spec.logit_softcap)}")


def _format_line(depth: int, text: str, comment: str = "") -> str:
    text = "    " * depth + text
    return f"{text:{_COMMENTS_AT}}# {comment}" if comment else text


def _without_slopes(layer: LayerSpec) -> LayerSpec:
    """Returns a layer without the slopes of lightning attention, which differ in each layer."""
    mixer = layer.attention
    if not isinstance(mixer, LightningSpec):
        return layer
    return replace(layer, attention=replace(mixer, slopes=(0.0,) * mixer.heads))


def _group_equal_layers(layers: tuple[LayerSpec, ...]) -> list[tuple[LayerSpec, list[int]]]:
    """Returns each distinct layer with the numbers of the layers equal to it, in order."""
    kinds: list[tuple[LayerSpec, list[int]]] = []
    for number, layer in enumerate(layers):
        numbers = next((numbers for kind, numbers in kinds if kind == layer), None)
        if numbers is None:
            kinds.append((layer, [number]))
        else:
            numbers.append(number)
    return kinds


def _ranges(numbers: list[int]) -> str:
    """Formats layer numbers as ranges, such as "0-3, 5", or with a step, such as "0, 2, 4 … 22"."""
    steps = {after - before for before, after in pairwise(numbers)}
    if len(numbers) > 3 and len(steps) == 1 and steps != {1}:
        return f"{', '.join(map(str, numbers[:3]))} … {numbers[-1]}"
    parts = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        inside = [number for _, number in run]
        parts.append(str(inside[0]) if len(inside) == 1 else f"{inside[0]}-{inside[-1]}")
    return ", ".join(parts)


def _norm_notes(spec: ModelSpec) -> str:
    notes = [f"eps {spec.rms_eps:g}"]
    if not spec.norm_weight:
        notes.append("no weights")
    if spec.norm_bias:
        notes.append("with biases")
    if spec.norm_offset:
        notes.append(f"weights + {spec.norm_offset:g}")
    return ", ".join(notes)


def _layer_lines(spec: ModelSpec, layer: LayerSpec) -> Iterator[tuple[str, str]]:
    """Yields the lines of a layer, with their comments."""
    before = layer.norms != "after"
    after = layer.norms in ("after", "both")
    norm = f"{spec.norm}_norm"
    scale = "" if layer.residual_scale == 1 else f" * {layer.residual_scale:.4g}"
    attended = f"{norm}(a)" if after else "a"
    residual = ["x", "x"]
    if layer.norms == "residual":
        residual = ["h" if kept == 1 else f"{kept:.4g} * h" for kept in layer.kept]
    if layer.block is not None:
        yield from _block_lines(spec, layer, layer.block)
        return
    if layer.depth is not None:
        yield from _depth_lines(layer, layer.depth, norm, _norm_notes(spec))
    elif layer.mixes:
        yield f"h = {norm}(x)" if before else "h = x", _norm_notes(spec) if before else ""
    if layer.mixes:
        yield from _mixer_lines(layer.attention, norm)
    if layer.beside is not None:
        yield from _state_space_lines(layer.beside, "m")
        attended += " + m"
    if layer.parallel:
        yield from _feed_forward_lines(
            layer.feed_forward, "h" if layer.parallel == "one norm" else f"{norm}(x)", norm
        )
        yield f"x = x + ({attended} + f){scale}", "attention and feed-forward beside each other"
        return
    weighted = "({} + shift) * factor + ({} + shift2) * factor2"
    total = weighted if layer.residual_weights else f"{{}} + {{}}{scale}"
    convs = layer.attention.short_convs if isinstance(layer.attention, AttentionSpec) else None
    factor = f" / sqrt({convs.taps + 1})" if convs is not None and convs.scaled else ""
    if convs is not None:
        yield f"a = {_scaled_sum('a', factor)}", f"over {convs.taps} tokens"
    if layer.mixes:
        yield f"x = {total.format(residual[0], attended)}", ""
    if layer.feeds:
        fed = "x" if layer.depth is None else "attend([blocks, x])"
        if layer.depth is not None and layer.depth.messages:
            fed = f"gate({fed}, message)"
        yield from _feed_forward_lines(
            layer.feed_forward, f"{norm}({fed})" if before else fed, norm
        )
        if convs is not None:
            learnt = "factor * " if convs.learns_factor else ""
            total_of_f = _scaled_sum("f", factor or " ") if learnt else _scaled_sum("f", factor)
            yield f"f = {learnt}{total_of_f.strip()}", f"over {convs.taps} tokens"
        yield f"x = {total.format(residual[1], f'{norm}(f)' if after else 'f')}", ""
    if layer.input_size:
        act = layer.feed_forward.activation
        yield f"x = x + {norm}(({act}(x @ Wg) * inputs[layer]) @ Wp)", f"through {layer.input_size}"
    if layer.scaled:
        yield "x = x * layer_scale", "a learnt number"
    if layer.result_scale != 1:
        yield f"x = x * {layer.result_scale:.4g}", ""


def _depth_lines(
    layer: LayerSpec, depth: DepthSpec, norm: str, notes: str
) -> Iterator[tuple[str, str]]:
    """Yields the lines that compute attention's input in a layer of a block."""
    separate = depth.norms > 1 or bool(depth.messages)
    if layer.repeats is not None:
        yield "# shares the weights of an earlier layer", ""
    if depth.restarts_from is not None:
        yield "x = the sum before the first pass", "a pass begins"
    read = "attend([blocks, x])" if depth.queries else "x"
    if depth.messages:
        yield "message = attend(previous pass's blocks)", "for each of q, k, v and feed-forward"
        read = f"gate({read}, message)"
    yield f"h = {norm}({read})", f"{notes}{', for each of q, k and v' if separate else ''}"
    if depth.writes_to is not None:
        yield "blocks, x = [blocks, x], 0", "a block of layers begins"


def _scaled_sum(name: str, factor: str) -> str:
    """Returns the sum of a block's output and its convolution, in parentheses before a factor."""
    total = f"{name} + convolve({name})"
    return f"({total}){factor}" if factor else total


def _block_lines(spec: ModelSpec, layer: LayerSpec, block: BlockSpec) -> Iterator[tuple[str, str]]:
    """Yields the lines of a layer with a block."""
    assert layer.beside is not None
    norm = f"{spec.norm}_norm"
    lender = block.weights_of
    notes = _norm_notes(spec) if lender is None else f"up to f, weights of layer {lender}"
    yield f"h = {norm}([x, embedding[token]])", notes
    if rank := block.attention_rank:
        yield "Wq, Wk, Wv = Wq + Aq Bq, Wk + Ak Bk, Wv + Av Bv", f"this layer's, of rank {rank}"
    yield from _mixer_lines(layer.attention, norm)
    if rank := block.feed_forward_rank:
        yield "gate, up = gate + A Bgate, up + A Bup", f"this layer's, of rank {rank}"
    yield from _feed_forward_lines(layer.feed_forward, f"{norm}(a)", norm)
    yield f"h = {norm}(x + f @ W)", ""
    yield from _state_space_lines(layer.beside, "m")
    yield "x = x + m", ""


def _mixer_lines(mixer: MixerSpec, norm: str) -> Iterator[tuple[str, str]]:
    if isinstance(mixer, LatentSpec):
        yield from _latent_lines(mixer)
    elif isinstance(mixer, ConvSpec):
        yield from _conv_lines(mixer)
    elif isinstance(mixer, DeltaSpec):
        yield from _delta_lines(mixer)
    elif isinstance(mixer, LightningSpec):
        yield from _lightning_lines(mixer)
    elif isinstance(mixer, Mamba1Spec | Mamba2Spec):
        yield from _state_space_lines(mixer, "a")
    elif isinstance(mixer, RgLruSpec):
        yield from _rg_lru_lines(mixer)
    elif isinstance(mixer, WkvSpec):
        yield from _wkv_lines(mixer)
    elif isinstance(mixer, MlstmSpec):
        yield from _mlstm_lines(mixer)
    elif isinstance(mixer, AttentionSpec):
        yield from _attention_lines(mixer, norm)


def _attention_lines(attention: AttentionSpec, norm: str) -> Iterator[tuple[str, str]]:
    if attention.keys_of is not None:
        yield from _query_lines(attention, norm)
        return
    bias = ", with biases" if attention.qkv_bias else ""
    sizes = f"{attention.key_size}"
    if attention.value_size != attention.key_size:
        sizes = f"{attention.key_size}, values of {attention.value_size}"
    values = "h @ Wk" if attention.keys_as_values else "h @ Wv"
    yield (
        f"q, k, v = h @ Wq, h @ Wk, {values}",
        f"{attention.heads} and {attention.kv_heads} heads of {sizes}{bias}",
    )
    if attention.clip is not None:
        yield f"q, k, v = clip(q, {attention.clip:g}), clip(k, …), clip(v, …)", ""
    if attention.taps is not None:
        first, second = attention.taps
        notes = f"over {first} and {second} tokens: of each channel, then of each head"
        yield "v = [v, (h @ Wv2) of the token before]", "half of the values each"
        yield "means = (q + k) / 2", "of each query and its key"
        yield "q, k = convolve(convolve(q)), convolve(convolve(k))", notes
        yield "q = rms_norm(q + means)", "of each head, no weights"
        yield "k = rms_norm(k + mean(means)) * key_factor", "a number for each head"
    if (convs := attention.short_convs) is not None:
        notes = f"over {convs.taps} tokens"
        if convs.dynamic:
            notes += ", by kernels that depend on the token"
        yield "k, v = k + convolve(k), v + convolve(v)", notes
        if convs.scaled:
            root = f"sqrt({convs.taps * (1 + convs.dynamic) + 1})"
            yield f"k, v = k / {root}, v / {root}", ""
    if (by_distance := attention.distance_bias) is not None:
        notes = f"{by_distance.extent:,} distances of each head, through {by_distance.rank}"
        yield "bias = (h @ Wr) @ bank", notes
    norms: list[tuple[str, str]] = []
    if attention.qk_norm:
        of = {
            "head": "each head",
            "heads": "each head, by weights of its own",
            "whole": "all heads together",
        }
        norms.append((f"q, k = {norm}(q), {norm}(k)", f"of {of[attention.qk_norm]}"))
    if not attention.norms_rotated:
        yield from norms
    if attention.norm_limit is not None:
        yield "q, k = shorten(q * factors), shorten(k)", f"to a norm of {attention.norm_limit:.4g}"
    if attention.value_norm:
        yield "v = rms_norm(v)", "of each head, no weights"
    if attention.rope.kind != "none":
        notes = f"theta {attention.rope.theta:g}"
        if attention.rope.rotary_dim not in (None, attention.key_size):
            notes += f", {attention.rope.rotary_dim} of {attention.key_size} elements"
        if attention.rope.kind != "default":
            notes += f", {attention.rope.kind}"
        yield "q, k = rotate(q, position), rotate(k, position)", notes
    if attention.norms_rotated:
        yield from norms
    if attention.rope.query_growth:
        tau = _query_factor(attention.rope)
        if attention.distance_bias is None:
            yield f"q = q * ({tau})", "natural logarithm"
        else:
            yield f"tau = {tau}", "natural logarithm"
            yield "q, bias = q * tau, bias * tau", ""
    yield "keys, values = cache(k, v)", ""
    scores = _apply_softcap(f"q @ keys.T * {attention.scale:.4g}", attention.softcap)
    if attention.slopes:
        scores += " + slopes * position"
    if attention.distance_bias is not None:
        scores += " + bias[distance]"
    seen = "earlier tokens and itself" if attention.causal else "all tokens"
    if attention.window is not None:
        seen = f"the last {attention.window:,} tokens"
        if attention.chunked:
            seen = f"earlier tokens of its chunk of {attention.window:,}, and itself"
    yield (
        f"a = softmax({scores}) @ values",
        seen
        + (", and a learnt sink" if attention.sinks else "")
        + (", and a sink h @ Ws" if attention.token_sinks else ""),
    )
    if attention.output_gate:
        yield "a = a * sigmoid(h @ Wg)", "a number for each head" if attention.gate_by_head else ""
    scale = "" if attention.output_scale == 1 else f" * {attention.output_scale:.4g}"
    yield f"a = a{scale} @ Wo", "with bias" if attention.output_bias else ""


def _query_lines(attention: AttentionSpec, norm: str) -> Iterator[tuple[str, str]]:
    """Yields the lines of attention over another layer's keys and values."""
    yield "q = h @ Wq", f"{attention.heads} heads of {attention.key_size}"
    yield f"q = rotate({norm}(q), position)", f"theta {attention.rope.theta:g}"
    seen = "earlier tokens and itself"
    if attention.window is not None:
        seen = f"the last {attention.window:,} tokens"
    yield f"a = softmax(q @ keys.T * {attention.scale:.4g}) @ values", seen
    yield "a = a @ Wo", f"keys and values of layer {attention.keys_of}"


def _query_factor(rope: RopeSpec) -> str:
    """Returns the expression by which queries are multiplied at a position."""
    at = _shifted_position(rope)
    grown = f"1 + {at} // {rope.query_span}"
    if rope.query_floor:
        grown = f"max({at} / {rope.query_span}, 1)"
    return f"1 + {rope.query_growth:g} * log({grown})"


def _shifted_position(rope: RopeSpec) -> str:
    return f"(position + {rope.query_shift})" if rope.query_shift else "position"


def _latent_lines(attention: LatentSpec) -> Iterator[tuple[str, str]]:
    bias = ", with biases" if attention.bias else ""
    heads = f"{attention.heads} heads of {attention.nope_size} + {attention.rope_size}"
    if attention.query_rank is None:
        yield "q = h @ Wq", heads
    else:
        yield (
            "q = rms_norm(h @ Wq_down) @ Wq_up",
            f"through {attention.query_rank:,}; {heads}{bias}",
        )
    yield (
        "c, kr = split(h @ Wkv_down)",
        f"a latent of {attention.rank} and a key of {attention.rope_size}{bias}",
    )
    notes = f"theta {attention.rope.theta:g}"
    if attention.rope.kind != "default":
        notes += f", {attention.rope.kind}"
    yield "qr, kr = rotate(q[rope], position), rotate(kr, position)", notes
    yield (
        "latents, rotated = cache(rms_norm(c), kr)",
        "all that is cached: keys and values are made of it",
    )
    yield "keys, values = latents @ Wk_up, latents @ Wv_up", f"values of {attention.value_size}"
    yield f"a = softmax((q[nope] @ keys.T + qr @ rotated.T) * {attention.scale:.4g}) @ values", ""
    if attention.output_gate:
        yield "a = a * sigmoid(h @ Wg)", "a number for each head"
    yield "a = a @ Wo", "with bias" if attention.output_bias else ""


def _delta_lines(delta: DeltaSpec) -> Iterator[tuple[str, str]]:
    gates = "h @ Wz, h @ Wb, h @ Wa"
    if delta.gate_rank:
        gates = "h @ Wz1 @ Wz2, h @ Wb, h @ Wa1 @ Wa2"
    yield (
        f"q, k, v, z, b, a = h @ Wq, h @ Wk, h @ Wv, {gates}",
        f"{delta.key_heads} key heads of {delta.key_size}, {delta.value_heads} value heads of {delta.value_size}",
    )
    yield "q, k, v = silu(convolve(q)), …", f"over {delta.taps} tokens"
    yield "q, k = q / |q| / sqrt(size), k / |k|", ""
    each = "element of a key" if delta.by_element else "value head"
    rate = "-exp(a_log) softplus(a + dt)"
    if delta.decay_bound is not None:
        rate = f"{delta.decay_bound:g} sigmoid(exp(a_log) (a + dt))"
    yield f"S = exp({rate}) S", f"of each {each}, from the token before"
    scale = "" if delta.beta_scale == 1 else f"{delta.beta_scale:g} "
    yield f"S = S + k ({scale}sigmoid(b) (v - S^T k))^T", "the gated delta rule"
    gate = "sigmoid" if delta.by_element else "silu"
    yield f"a = (rms_norm(S^T q) * {gate}(z)) @ Wo", ""


def _lightning_lines(lightning: LightningSpec) -> Iterator[tuple[str, str]]:
    yield (
        "q, k, v = silu(h @ Wq), silu(h @ Wk), silu(h @ Wv)",
        f"{lightning.heads} heads of {lightning.size}",
    )
    yield "z = h @ Wz", ""
    yield "S = exp(-slope) S + v k^T", "of each head, from the token before"
    scale = "" if lightning.output_scale == 1 else f" * {lightning.output_scale:.4g}"
    yield f"a = (rms_norm(S q) * sigmoid(z)){scale} @ Wo", "all heads are normalised together"


def _state_space_lines(mamba: Mamba1Spec | Mamba2Spec, result: str) -> Iterator[tuple[str, str]]:
    if isinstance(mamba, Mamba1Spec):
        yield from _mamba1_lines(mamba, result)
    else:
        yield from _mamba2_lines(mamba, result)


def _mamba1_lines(mamba: Mamba1Spec, result: str) -> Iterator[tuple[str, str]]:
    yield "x, z = h @ Wx, h @ Wz", f"{mamba.size:,} channels{', with biases' if mamba.bias else ''}"
    yield "x = silu(convolve(x))", f"over {mamba.taps} tokens"
    sizes = f"of {mamba.rank}, {mamba.state_size} and as many"
    groups = f", of each of {mamba.groups} groups of channels" if mamba.groups > 1 else ""
    yield "low, b, c = x @ Wlow, x @ Wb, x @ Wc", sizes + groups
    if mamba.norm_eps is not None:
        yield "low, b, c = rms_norm(low), rms_norm(b), rms_norm(c)", f"eps {mamba.norm_eps:g}"
    yield "step = softplus(low @ Wstep + offset)", ""
    yield "S = exp(-exp(a_log) step) S + step x b", "of each channel, from the token before"
    yield f"{result} = ((S c + d x) * silu(z)) @ Wout", "with bias" if mamba.bias else ""


def _mamba2_lines(mamba: Mamba2Spec, result: str) -> Iterator[tuple[str, str]]:
    bias = ", with biases" if mamba.bias else ""
    yield (
        "z, x, b, c, dt = h @ Wz, h @ Wx, h @ Wb, h @ Wc, h @ Wdt",
        f"{mamba.heads} heads of {mamba.head_size}, {mamba.groups} groups of {mamba.state_size}{bias}",
    )
    if mamba.scales:
        yield (
            "z, x, b, c, dt = z * {:g}, x * {:g}, b * {:g}, c * {:g}, dt * {:g}".format(
                *mamba.scales
            ),
            "",
        )
    yield "x, b, c = silu(convolve(x)), …", f"over {mamba.taps} tokens"
    low, high = mamba.step_limits
    limits = "" if (low, high) == (0, math.inf) else f"from {low:g} to {high:g}"
    yield "step = softplus(dt + offset)", limits
    yield "S = exp(-exp(a_log) step) S + step x b^T", "of each head, from the token before"
    out = {
        "after": "rms_norm((S c + d x) * silu(z))",
        "before": "rms_norm(S c + d x) * silu(z)",
        "": "(S c + d x) * silu(z)",
    }[mamba.norm]
    scale = "" if mamba.output_scale == 1 else f" * {mamba.output_scale:.4g}"
    notes = ["each group's outputs are normalised"] if mamba.norm else []
    notes += ["with bias"] if mamba.output_bias else []
    yield f"{result} = {out}{scale} @ Wout", ", ".join(notes)


def _rg_lru_lines(lru: RgLruSpec) -> Iterator[tuple[str, str]]:
    yield "x, y = h @ Wx, h @ Wy", f"{lru.size:,} channels, with biases"
    yield "x = convolve(x)", f"over {lru.taps} tokens"
    yield (
        "enter, forget = sigmoid(x @ We), sigmoid(x @ Wf)",
        f"{lru.heads} blocks of {lru.value_size}, with biases",
    )
    yield "a = exp(-8 softplus(decay) forget)", ""
    yield "S = a S + sqrt(1 - a^2) enter x", "of each channel; the first token's root is 1"
    yield "a = (S * gelu(y)) @ Wout", "with bias"


def _wkv_lines(wkv: WkvSpec) -> Iterator[tuple[str, str]]:
    yield "hk, hv, hr = mix(h, h_before)", "with the token before, by learnt shares"
    yield "k, v, r = hk @ Wk, hv @ Wv, hr @ Wr", f"{wkv.size:,} channels"
    yield "a = (A + exp(first + k) v) / (B + exp(first + k))", "A and B after the token before"
    yield "A = exp(-exp(decay)) A + exp(k) v", "of each channel, never overflows"
    yield "B = exp(-exp(decay)) B + exp(k)", ""
    yield "a = (sigmoid(r) * a) @ Wo", ""


def _mlstm_lines(mlstm: MlstmSpec) -> Iterator[tuple[str, str]]:
    sizes = f"{mlstm.heads} heads of {mlstm.key_size}, values of {mlstm.value_size}"
    yield "q, k, v, z = h @ Wq / sqrt(size), h @ Wk, h @ Wv, h @ Wz", sizes
    gate = f"{mlstm.gate_cap:g} * tanh((h @ {{0}} + {{1}}) / {mlstm.gate_cap:g})"
    yield f"i = {gate.format('Wi', 'bi')}", ""
    yield f"f = log(sigmoid({gate.format('Wf', 'bf')}))", ""
    yield "m, old = max(f + m, i), m", "of each head, from the token before"
    yield "C = exp(f + old - m) C + exp(i - m) k v^T", ""
    yield "n = exp(f + old - m) n + exp(i - m) k", ""
    yield f"a = C^T q / (max(|n q|, exp(-m)) + {mlstm.eps:g})", ""
    yield "a = (layer_norm(a) * sigmoid(z)) @ Wo", "each head is normalised by itself"


def _conv_lines(conv: ConvSpec) -> Iterator[tuple[str, str]]:
    bias = ", with biases" if conv.bias else ""
    yield "b, c, x = h @ Wb, h @ Wc, h @ Wx", f"{conv.size:,} channels{bias}"
    yield "inputs = cache(b * x)", f"of the last {conv.window} tokens"
    plus = " + bias" if conv.bias else ""
    yield f"a = c * (sum(kernel * inputs){plus})", "each channel by itself"
    yield "a = a @ Wo", "with bias" if conv.bias else ""


def _feed_forward_lines(
    feed_forward: DenseSpec | ExpertsSpec, source: str, norm: str
) -> Iterator[tuple[str, str]]:
    if source != "h":
        yield f"h = {source}", ""
    if isinstance(feed_forward, DenseSpec):
        act = feed_forward.activation
        bias = ", with biases" if feed_forward.bias else ""
        if feed_forward.mixed:
            yield "hk, hr = mix(h, h_before)", "with the token before, by learnt shares"
            notes = f"through {feed_forward.size:,}"
            yield f"f = sigmoid(hr @ Wr) * ({act}(hk @ up) @ down)", notes
            return
        gate = "h @ gate"
        if feed_forward.gate_scale != 1:
            gate = f"{feed_forward.gate_scale:.4g} * {gate}"
        inner = f"{act}({gate}) * (h @ up)" if feed_forward.gated else f"{act}(h @ up)"
        if feed_forward.inner_scale != 1:
            inner = f"{feed_forward.inner_scale:.4g} * {inner}"
        yield f"f = ({inner}) @ down", f"through {feed_forward.size:,}{bias}"
        return
    of = feed_forward
    rows = f"{norm}(x)" if of.apart else "h"
    if of.router_size:
        carried = " + carry * r" if of.carries else ""
        notes = f"through {of.router_size}{', and r of the layer before' if carried else ''}"
        yield f"r = h @ inner + bias{carried}", notes
        yield f"h2 = gelu(gelu({norm}(r) @ first + bias) @ second + bias)", ""
        rows = "h2"
    scored = f"{of.scoring}({rows} @ router{' + bias' if of.router_bias else ''})"
    rows = f"{norm}(x)" if of.apart else "h"
    groups = f", of the best {of.kept_groups} of {of.groups} groups" if of.groups > 1 else ""
    chosen = "scores + correction" if of.correction else "scores"
    yield f"scores = {scored}", f"{of.count} experts{', and none' if of.skips else ''}"
    yield f"chosen = top_k({chosen}, {of.top_k - of.always})", f"for each token{groups}"
    weights = (
        "scores[chosen]"
        + (" / sum" if of.normalise else "")
        + ("" if of.scale == 1 else f" * {of.scale:g}")
        + (" * expert_scales[chosen]" if of.expert_scales else "")
    )
    bias = ", with biases" if of.bias else ""
    inner = f"{of.activation}(gate) * up" if of.gated else f"{of.activation}(up)"
    if of.always:
        yield "chosen = chosen + shared", f"the last {of.always} experts"
    yield f"f = sum({weights} * expert({rows}))", f"{inner}, through {of.size:,}{bias}"
    if of.shared_size:
        gate = "sigmoid(h @ shared_gate) * " if of.shared_gate else ""
        if of.shared_scale != 1:
            gate = f"{of.shared_scale:g} * {gate}"
        sums = f"{norm}(f) + {norm}(shared(h))" if of.apart else f"f + {gate}shared(h)"
        yield f"f = {sums}", f"an expert of {of.shared_size:,} for every token"


def _apply_softcap(text: str, softcap: float | None) -> str:
    return text if softcap is None else f"{softcap:g} * tanh(({text}) / {softcap:g})"
