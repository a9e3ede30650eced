"""Use fwlab in Hugging Face's transformers, and the other way round.

`patch` lets the models of transformers compute their delta rules with fwlab.
`FwlabForCausalLM` gives a language model of fwlab the interface of transformers.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from fwlab import ops
from fwlab.data.vocabulary import END, UNKNOWN, Characters, Vocabulary
from fwlab.layers import one_token
from fwlab.models import LanguageModel

try:
    import tokenizers
    import transformers
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils.generic import can_return_tuple
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'fwlab.hf needs the package transformers: pip install "fwlab[hf]"',
        name=error.name,
    ) from error

__all__ = ["FwlabConfig", "FwlabForCausalLM", "from_run", "patch", "unpatch"]

#: The rule that each function of transformers computes, for chunks or single tokens.
#: transformers calls these functions without a GPU.
RULES = {
    "torch_chunk_gated_delta_rule": ops.gated_delta_rule,
    "torch_recurrent_gated_delta_rule": ops.gated_delta_rule,
    "chunk_kimi_delta_attention": ops.kimi_delta_rule,
    "recurrent_kimi_delta_attention": ops.kimi_delta_rule,
}
#: Arguments that the functions in `RULES` must have.
ARGUMENTS = {"query", "key", "value", "g", "beta", "initial_state"}
ARGUMENTS |= {"output_final_state", "use_qk_l2norm_in_kernel"}
CONVOLUTION = "causal_conv1d_fn"
#: The model types that have functions in `RULES`, in transformers 5.24.
FAMILIES = (
    *("bailing_hybrid", "glm5_next", "kimi_linear", "lara_mini", "olmo_hybrid"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"),
)


# --- transformers, computed by fwlab ---


def patch() -> tuple[str, ...]:
    """Compute the delta rules of transformers' models with fwlab.

    - Returns the model types whose functions are replaced.
    - Raises `RuntimeError`, and replaces nothing, if a model file of the installed
      transformers does not call the functions that are known here.

    Models that exist already are patched, too, since each call of a layer looks up the
    function by its name in the module. A second call changes nothing. Packed documents
    are kept apart (`cu_seq_lens_q`, or `cu_seqlens` for the function itself), in the
    short convolution, too.
    """
    for module, name in _hooks():
        theirs = getattr(module, name)
        if not hasattr(theirs, "replaces"):
            convolve = functools.partial(_convolve, theirs)
            rule = RULES.get(name)
            ours: Any = functools.partial(_compute, rule) if rule else convolve
            ours.replaces = theirs
            setattr(module, name, functools.update_wrapper(ours, theirs))
    modules = dict.fromkeys(module for module, _ in _hooks())
    return tuple(module.__name__.split(".")[-2] for module in modules)


def unpatch() -> None:
    """Undo `patch`, so that transformers uses its own functions again."""
    for module, name in _hooks():
        ours = getattr(module, name)
        if hasattr(ours, "replaces"):
            setattr(module, name, ours.replaces)


@functools.cache
def _hooks() -> tuple[tuple[ModuleType, str], ...]:
    """Return (module, name) of each function of transformers that `patch` replaces."""
    hooks: list[tuple[ModuleType, str]] = []
    for family in FAMILIES:
        package = f"transformers.models.{family}"
        if importlib.util.find_spec(package) is None:  # This release lacks the model.
            continue
        module = importlib.import_module(f"{package}.modeling_{family}")
        called = _called(module)
        functions = {name: getattr(module, name) for name in RULES if name in called}
        takes = [inspect.signature(f).parameters.keys() for f in functions.values()]
        known = len(takes) == 2 and all(names >= ARGUMENTS for names in takes)
        if not known or CONVOLUTION not in called:
            raise RuntimeError(
                f"patch: expected models of {family} to call a chunked and a "
                "recurrent rule by their names, as in transformers 5.24, got "
                f"transformers {transformers.__version__}, which does not"
            )
        hooks += [(module, name) for name in (*functions, CONVOLUTION)]
    return tuple(hooks)


def _called(module: ModuleType) -> set[str]:
    """Return the names that the `forward` methods in a module use."""
    forwards = [
        vars(x).get("forward") for x in vars(module).values() if isinstance(x, type)
    ]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in forwards if f]
    return {name for code in codes if code for name in code.co_names}


def _compute(
    rule: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute a rule, with the same arguments and results as transformers' functions.

    Arguments that a model passes to all its layers are ignored. The state of
    transformers is `[batch, heads, key, value]`, the transpose of ours.
    """
    dtype = torch.promote_types(value.dtype, torch.float32)
    v, beta, g = value.to(dtype).contiguous(), beta.to(dtype), g.to(dtype)
    qk = torch.cat([query, key], 2).to(dtype)
    if use_qk_l2norm_in_kernel:
        length = torch.linalg.vector_norm(qk, dim=-1, keepdim=True)
        qk = qk * (length * length + 1e-6).rsqrt()
    group = v.shape[2] // key.shape[2]
    q, k = (qk.repeat_interleave(group, 2) if group > 1 else qk).chunk(2, 2)
    gates, scale = {"beta": beta, "log_decay": g}, k.shape[-1] ** -0.5
    W: Any = None if initial_state is None else initial_state.to(dtype).mT
    documents = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    found = None
    if v.shape[1] == 1 and documents is None:
        found = one_token.step(rule, q, k, v, gates, W, False)
        if found is not None:
            found = (scale * found[0], found[1])
    if found is None:
        options = {"scale": scale, "cu_seqlens": documents, "state": W}
        found = rule(q, k, v, **gates, return_state=output_final_state, **options)
    y, W = found if isinstance(found, tuple) else (found, None)
    return y.to(query.dtype), W.mT if output_final_state else None


def _convolve(
    theirs: Callable,
    x: Tensor,
    *weights: Any,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Apply the model's convolution to each packed document separately."""
    if cu_seq_lens_q is None:
        return theirs(x, *weights, **options)
    options.pop("seq_idx", None)  # `seq_idx` also describes the documents.
    parts = x.split(cu_seq_lens_q.diff().tolist(), -1)
    return torch.cat([theirs(part, *weights, **options) for part in parts], -1)


# --- A model of fwlab, as a model of transformers ---

#: Further arguments that every configuration of transformers takes.
COMMON = (
    *("model_type", "name_or_path", "torch_dtype", "num_labels", "tokenizer_class"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "output_attentions"),
    *("attn_implementation", "experts_implementation", "quantization_config"),
    *("auto_map", "_commit_hash"),
)
#: Arguments of `forward` that are for the loss function of transformers.
OF_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}
#: Further arguments that a collator passes for packed documents, which are ignored.
OF_PACKING = {"cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}


class FwlabConfig(PreTrainedConfig):
    """Hold the arguments of a `LanguageModel` as a configuration of transformers.

    - `vocab_size`: number of tokens, at least 1.
    - `kwargs`: the other arguments of `LanguageModel`, and those of every configuration
      of transformers, by name. What is loaded from a file may have more attributes,
      which other programs have added.
    - Raises `TypeError` for other arguments, and for a `mixer` that is not named.

    Sizes also have their names of transformers:

        >>> FwlabConfig(vocab_size=65, mixer="gated-delta", layers=2).hidden_size
        128
    """

    model_type = "fwlab"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "max_position_embeddings": "max_len",
        "tie_word_embeddings": "tied",
    }

    def __init__(self, vocab_size: int = 256, **kwargs: Any):
        parameters = inspect.signature(LanguageModel).parameters.items()
        usual = {name: x.default for name, x in parameters}
        known = {*usual, *self.attribute_map, *vars(PreTrainedConfig()), *COMMON}
        loaded = "transformers_version" in kwargs
        if (unknown := kwargs.keys() - known) and not loaded:
            raise TypeError(
                f"FwlabConfig: expected arguments of LanguageModel ({', '.join(usual)}) "
                f"or of every configuration, got {', '.join(sorted(unknown))}"
            )
        super().__init__(**usual | kwargs | {"vocab_size": vocab_size})
        names = self.mixer if isinstance(self.mixer, list | tuple) else [self.mixer]
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                "FwlabConfig: expected mixer to be a name or several, which a file "
                f"can hold, got {self.mixer!r}"
            )

    def language_model(self) -> LanguageModel:
        """Build a new `LanguageModel` with the arguments in the configuration.

        - Returns the model, untrained.
        """
        names = inspect.signature(LanguageModel).parameters
        return LanguageModel(**{name: getattr(self, name) for name in names})


class FwlabCache:
    """Hold the state of a `LanguageModel` between tokens, for `generate`.

    - `state`: as `LanguageModel.prefill` returns it; None = start of text.
    - `length`: number of tokens so far, padding included.

    It is not a cache of transformers, whose layers for linear attention copy states of
    constant size in place, with 0 as the empty state.
    """

    is_linear = (False,)  # `generate` then continues from `get_seq_length`.
    is_compileable = is_croppable = False

    def __init__(self) -> None:
        self.state: Any = None
        self.length = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens that the cache has seen, padding included."""
        return self.length

    def reset(self) -> None:
        """Reset the cache to the start of a text."""
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Select the rows `beam_idx` of the state, for beam search."""
        self.state = tree_map_only(
            Tensor, lambda x: x.index_select(0, beam_idx.to(x.device)), self.state
        )


class FwlabForCausalLM(PreTrainedModel, GenerationMixin):
    """Wrap a `LanguageModel` in the interface of transformers.

    - `config`: the arguments of the model.
    - `language_model`: a model with these arguments, such as a trained one; None = a
      new one.

    `generate` works with greedy search, sampling and beams, and `save_pretrained` and
    `from_pretrained` with safetensors. After `import fwlab.hf`, `AutoModelForCausalLM`
    finds the class of a saved folder.

        >>> model = FwlabForCausalLM(FwlabConfig(vocab_size=9, d_model=8, heads=2))
        >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
        torch.Size([1, 5])
    """

    config_class = FwlabConfig
    _is_stateful = True  # `generate` cannot remove tokens from a state.
    supports_gradient_checkpointing = True

    def __init__(
        self, config: FwlabConfig, language_model: LanguageModel | None = None
    ):
        super().__init__(config)
        self.language_model = language_model or config.language_model()
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` creates a `FwlabCache`.

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Restore the constant tables of a module, which no checkpoint contains."""
        if not module._non_persistent_buffers_set:
            return
        new = self.config.language_model()
        for name, part in self.language_model.named_modules():
            if part is module:
                for table in part._non_persistent_buffers_set:
                    getattr(part, table).copy_(getattr(new.get_submodule(name), table))

    def get_input_embeddings(self) -> Any:
        """Return the module of the token embeddings.

        - Returns a module, whose weights are tied to the logits if the model is `tied`.
        """
        return self.language_model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the module of the token embeddings.

        - `value`: an `nn.Embedding`, or an adapter around an `nn.Embedding`.
        """
        self.language_model.embedding = value  # type: ignore[assignment]
        self.language_model.vocab_size = len(value.weight)  # type: ignore[arg-type]

    def get_output_embeddings(self) -> Any:
        """Return the layer that computes the logits.

        - Returns a module; in a tied model, the embeddings.
        """
        layer = self.language_model.to_logits
        return self.language_model.embedding if layer is None else layer

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the layer that computes the logits.

        - `new_embeddings`: an `nn.Linear` without bias; in a tied model, only the
          embeddings that it has.
        - Raises `ValueError` for another module in a tied model.
        """
        if self.language_model.to_logits is not None:
            self.language_model.to_logits = new_embeddings  # type: ignore[assignment]
        elif new_embeddings is not self.language_model.embedding:
            raise ValueError(
                "FwlabForCausalLM: expected tied=False for output embeddings of their "
                "own, got a tied model: set_input_embeddings changes both"
            )

    @property
    def gradient_checkpointing(self) -> bool:  # type: ignore[override]
        """Return True if blocks are recomputed in the backward pass."""
        return bool(self.language_model.checkpointing)

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, enable: bool) -> None:
        how: Any = self._gradient_checkpointing_func if enable else False
        self.language_model.checkpointing = how

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: FwlabCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: FwlabCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute the logits of the next token at every position.

        - `input_ids`: `int64 [batch, time]`.
        - `attention_mask`: `[batch, past + time]`, 0 = padding, as `key_mask` of
          `LanguageModel`.
        - `cache`: what an earlier call returned; None = start of text. Before
          transformers 5.24, its name here and in what is returned was
          `past_key_values`.
        - `labels`: `int64 [batch, time]`, usually `input_ids`: the loss is that of each
          token given those before it, without those of -100.
        - `use_cache`: return a cache; None = no.
        - `logits_to_keep`: only those of this many last tokens, or those at these
          places, `int64 [places]`; 0 = all. The loss is that of all.
        - `cu_seq_lens_q`: the borders of packed documents, as `cu_seqlens` of
          `LanguageModel`; without a cache.
        - `position_ids`: `[batch or 1, time]`, the number of real tokens before each
          one, as the model counts them itself. Where they begin again, in one row and
          without a cache, a packed document begins.
        - `output_hidden_states`: also return what goes into the first block and comes
          out of each, the last after the norm; None = as in the configuration. A mixer
          that is the whole stack is one block.
        - `kwargs`: for the loss function of transformers (`num_items_in_batch`,
          `ignore_index`, `shift_labels`), and what a collator says of packed documents
          beside their borders.
        - Returns `logits`, with `labels` a `loss`, with a cache `cache`, and
          `hidden_states`, blocks + 1 of `[batch, time, d_model]`.
        - Raises `TypeError` for other arguments, and `ValueError` for what this model
          cannot do: other positions, and packed documents with a cache or with a mixer
          that cannot keep them apart.
        """
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = FwlabCache()
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        packed = cu_seq_lens_q is not None or position_ids is not None
        known = OF_LOSS | OF_PACKING if packed else OF_LOSS
        mask = _check_inputs(input_ids, attention_mask, cache, kwargs, known)
        borders = cu_seq_lens_q
        if borders is None and position_ids is not None:
            borders = _borders(input_ids, mask, cache, position_ids)
        if cache is not None and borders is not None:
            raise ValueError(
                "FwlabForCausalLM: expected cu_seq_lens_q without a cache, got both"
            )
        asked = output_hidden_states
        asked = self.config.output_hidden_states if asked is None else asked
        hidden: list[Tensor] | None = [] if asked else None
        model, time, keep = self.language_model, input_ids.shape[1], logits_to_keep
        if cache is None:
            logits = model(input_ids, borders, mask, hidden=hidden)
        elif time == 1 and cache.length and mask is None and hidden is None:
            logits, cache.state = model.step(input_ids[:, 0], cache.state)
            logits = logits[:, None]
        else:  # Losses and hidden states need all tokens.
            last = (
                isinstance(keep, int)
                and keep == 1
                and labels is None
                and hidden is None
            )
            logits, cache.state = model.prefill(
                input_ids, cache.state, mask, last=last, hidden=hidden
            )
            logits = logits[:, None] if last else logits
        if cache is not None:
            cache.length += time
        loss = None
        if labels is not None:
            given = {name: kwargs[name] for name in OF_LOSS & kwargs.keys()}
            size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, **given)
        logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        # Pass the cache by position, since transformers 5.24 renamed the argument.
        output = CausalLMOutputWithPast(loss, logits, cache)  # type: ignore[arg-type]
        if hidden is not None:
            output.hidden_states = tuple(hidden)
        return output


def _check_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: Any,
    kwargs: dict[str, Any],
    known: set[str],
) -> Tensor | None:
    """Return the padding mask, or None without padding. Raise for unknown arguments."""
    asked = {name for name, x in kwargs.items() if not (x is None or x is False)}
    if unknown := asked - known:
        raise TypeError(
            "FwlabForCausalLM: expected arguments of forward, which takes no "
            "inputs_embeds and has no attention weights to return, got "
            f"{', '.join(sorted(unknown))}"
        )
    if cache is not None and not isinstance(cache, FwlabCache):
        raise TypeError(
            "FwlabForCausalLM: expected cache to be a FwlabCache, as an earlier call "
            f"returned it, got a {type(cache).__name__}"
        )
    if attention_mask is None:
        return None
    batch, time = input_ids.shape
    past = 0 if cache is None else cache.length
    if [*attention_mask.shape] not in ([batch, time], [batch, past + time]):
        raise ValueError(
            f"FwlabForCausalLM: expected attention_mask of shape [{batch}, "
            f"{past + time}], got {[*attention_mask.shape]}"
        )
    mask = attention_mask[:, attention_mask.shape[1] - time :].bool()
    return None if mask.all() else mask


def _borders(
    input_ids: Tensor, mask: Tensor | None, cache: Any, position_ids: Tensor
) -> Tensor | None:
    """Return the borders of packed documents, which begin where positions restart.

    None for a single document. Raises `ValueError` for positions that the model does
    not count itself.
    """
    counted = torch.ones_like(input_ids) if mask is None else mask
    counted, borders = counted.cumsum(1) - 1, None
    starts = (position_ids == 0).nonzero()[:, -1]
    if cache is not None and cache.state is not None:
        counted += torch.as_tensor(cache.state[0], device=counted.device).view(-1, 1)
    elif mask is None and len(position_ids) == 1 < len(starts) and not starts[0]:
        borders = F.pad(starts, (0, 1), value=input_ids.shape[1])
        counted -= starts.repeat_interleave(borders.diff())
    fits = position_ids.shape in (counted.shape, counted[:1].shape)
    real = True if mask is None else mask
    if not fits or ((position_ids != counted) & real).any():
        raise ValueError(
            "FwlabForCausalLM: expected position_ids that count the real tokens of each "
            "row, or of each packed document, got others, of shape "
            f"{[*position_ids.shape]}"
        )
    return borders


AutoConfig.register("fwlab", FwlabConfig, exist_ok=True)
AutoModelForCausalLM.register(FwlabConfig, FwlabForCausalLM, exist_ok=True)
# With label smoothing, `Trainer` shifts labels only for models in this mapping.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["fwlab"] = FwlabForCausalLM.__name__


def from_run(path: str | Path) -> tuple[FwlabForCausalLM, PreTrainedTokenizerFast]:
    """Return a run of `fwlab train` as a model of transformers, with its tokenizer.

    - `path`: as for `fwlab.training.load`.
    - Returns both, on the CPU. `save_pretrained` of each into one folder makes a folder
      that other programs can load after `import fwlab.hf`.
    - Raises `CheckpointError` as `fwlab.training.load` does.

    The tokenizer splits text into the characters or words of the run. It refuses
    unknown characters.
    """
    from fwlab.training import checkpoint

    run = checkpoint.load(path)
    arguments = checkpoint.model_arguments(run.config)
    config = FwlabConfig(vocab_size=len(run.vocabulary), **arguments)
    return FwlabForCausalLM(config, run.model).eval(), _tokenizer(run.vocabulary)


def _tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    index = {token: i for i, token in enumerate(vocabulary.vocabulary)}
    special = {"unk_token": UNKNOWN} if UNKNOWN in index else {}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(index, **special))
    if isinstance(vocabulary, Characters):
        split = tokenizers.pre_tokenizers.Split
        tokenizer.pre_tokenizer = split(tokenizers.Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = tokenizers.decoders.Fuse()
    else:
        tokenizer.normalizer = tokenizers.normalizers.Replace("\n", f" {END} ")
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    options = {"clean_up_tokenization_spaces": False, **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
