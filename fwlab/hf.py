"""Both ways between fwlab and Hugging Face's transformers.

`patch` lets the models of transformers compute their delta rules with fwlab.
`FwlabForCausalLM` gives a language model of fwlab the interface of
transformers.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from fwlab import ops
from fwlab.data.vocabulary import END, UNKNOWN, Characters, Vocabulary
from fwlab.layers import Block, one_token
from fwlab.models import LanguageModel
from fwlab.models.language_model import RowStates, _back

try:
    import transformers
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
    )
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.cache_utils import Cache
    from transformers.modeling_outputs import CausalLMOutputWithPast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    from transformers.utils.generic import can_return_tuple
except ModuleNotFoundError as error:
    if error.name != "transformers":  # one that it needs itself
        raise
    raise ModuleNotFoundError(
        'fwlab.hf needs the package transformers: pip install "fwlab[hf]"',
        name=error.name,
    ) from None

__all__ = [
    "FwlabConfig",
    "FwlabForCausalLM",
    "from_run",
    "patch",
    "unpatch",
]

#: The functions that transformers calls without a GPU, chunks and a token at
#: a time, and the rule that they compute.
RULES = {
    "torch_chunk_gated_delta_rule": ops.gated_delta_rule,
    "torch_recurrent_gated_delta_rule": ops.gated_delta_rule,
    "chunk_kimi_delta_attention": ops.kimi_delta_rule,
    "recurrent_kimi_delta_attention": ops.kimi_delta_rule,
}
CONVOLUTION = "causal_conv1d_fn"
#: The model types with these functions in transformers 5.24.
FAMILIES = (
    *("bailing_hybrid", "glm5_next", "kimi_linear", "lara_mini", "olmo_hybrid"),
    *("qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen4_exp"),
)


# transformers, computed by fwlab


def patch() -> tuple[str, ...]:
    """Compute the delta rules of transformers' models with fwlab.

    - Returns the model types whose functions are replaced.
    - Raises `RuntimeError`, and replaces nothing, if a model file of the
      installed transformers does not call the functions that are known here.

    Models that exist already are patched, too, since each call of a layer
    looks up the function by its name in the module. A second call changes
    nothing. Packed documents are kept apart (`cu_seq_lens_q`, or `cu_seqlens`
    for the function itself), in the short convolution, too.
    """
    for module, name in _hooks():
        theirs = getattr(module, name)
        if not hasattr(theirs, "replaces"):
            setattr(module, name, _replacement(name, theirs))
    return tuple(dict.fromkeys(_family(module) for module, _ in _hooks()))


def unpatch() -> None:
    """Undo `patch`: transformers has its own functions again."""
    for module, name in _hooks():
        ours = getattr(module, name)
        if hasattr(ours, "replaces"):
            setattr(module, name, ours.replaces)


def _family(module: ModuleType) -> str:
    return module.__name__.split(".")[-2]


@functools.cache
def _hooks() -> tuple[tuple[ModuleType, str], ...]:
    """The functions to replace: their modules and names."""
    hooks: list[tuple[ModuleType, str]] = []
    for family in FAMILIES:
        package = f"transformers.models.{family}"
        if importlib.util.find_spec(package) is None:  # not in this version
            continue
        module = importlib.import_module(f"{package}.modeling_{family}")
        names = [name for name in RULES if _takes_ours(getattr(module, name, None))]
        if len(names) != 2 or not {*names, CONVOLUTION} <= _called(module):
            raise RuntimeError(
                f"patch: expected models of {family} to call a chunked and a "
                "recurrent rule by their names, as in transformers 5.24, got "
                f"transformers {transformers.__version__}, which does not"
            )
        hooks += [(module, name) for name in (*names, CONVOLUTION)]
    return tuple(hooks)


def _takes_ours(function: Any) -> bool:
    """Whether a function has the arguments that its replacement takes."""
    if not callable(function):
        return False
    wanted = {"query", "key", "value", "g", "beta", "initial_state"}
    wanted |= {"output_final_state", "use_qk_l2norm_in_kernel"}
    return wanted <= inspect.signature(function).parameters.keys()


def _called(module: ModuleType) -> set[str]:
    """The names that the `forward` of a layer in a module looks up."""
    forwards = [
        vars(x).get("forward") for x in vars(module).values() if isinstance(x, type)
    ]
    codes = [getattr(inspect.unwrap(f), "__code__", None) for f in forwards if f]
    return {name for code in codes if code for name in code.co_names}


def _replacement(name: str, theirs: Callable) -> Callable:
    """What takes the place of one of their functions."""
    ours: Any = _apart(theirs)
    if name in RULES:
        ours = functools.partial(_compute, RULES[name])
    functools.update_wrapper(ours, theirs)
    ours.replaces = theirs
    return ours


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
    """A rule with the arguments and results of their functions.

    As theirs, it drops what a model passes on to all its layers. A state of theirs
    is `[batch, heads, key, value]`, the transpose of ours.
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


def _apart(convolve: Callable) -> Callable:
    """Their convolution, applied to one packed document after another."""

    def run(
        x: Tensor, *weights: Any, cu_seq_lens_q: Tensor | None = None, **options: Any
    ) -> Tensor:
        if cu_seq_lens_q is None:
            return convolve(x, *weights, **options)
        options.pop("seq_idx", None)  # the documents again
        borders = pairwise(cu_seq_lens_q.tolist())
        return torch.cat(
            [convolve(x[..., a:b], *weights, **options) for a, b in borders], -1
        )

    return run


# A model of fwlab, as one of transformers

#: More arguments that every configuration takes.
COMMON = (
    *("model_type", "name_or_path", "torch_dtype", "num_labels", "tokenizer_class"),
    *("pad_token_id", "bos_token_id", "eos_token_id", "output_attentions"),
    *("attn_implementation", "experts_implementation", "quantization_config"),
    *("auto_map", "_commit_hash"),
)
#: What `forward` takes for the loss function of transformers.
OF_LOSS = {"num_items_in_batch", "ignore_index", "shift_labels"}
#: What a collator says of packed documents beside their borders.
OF_PACKING = {"cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"}
#: Arguments of their models that cannot work here, and why.
REFUSED = {
    "inputs_embeds": "the model looks up its embeddings itself: expected input_ids",
    "output_attentions": "no mixer here returns a matrix of attention weights",
}


class FwlabConfig(PreTrainedConfig):
    """The arguments of a `LanguageModel`, as a configuration of transformers.

    - `vocab_size`: number of tokens, at least 1.
    - `kwargs`: the other arguments of `LanguageModel`, and those of every
      configuration of transformers, by name.
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
        if unknown := kwargs.keys() - self._known():
            raise TypeError(
                f"FwlabConfig: expected arguments of LanguageModel ({', '.join(usual)}) "
                f"or of every configuration, got {', '.join(sorted(unknown))}"
            )
        for theirs, ours in self.attribute_map.items():
            if {theirs, ours} <= kwargs.keys():
                raise TypeError(
                    f"FwlabConfig: expected {ours} or {theirs}, which are two names of "
                    "the same, got both"
                )
        super().__init__(**usual | kwargs | {"vocab_size": vocab_size})
        names = self.mixer if isinstance(self.mixer, list | tuple) else [self.mixer]
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                "FwlabConfig: expected mixer to be a name or several, which a file "
                f"can hold, got {self.mixer!r}"
            )

    @classmethod
    def _known(cls) -> set[str]:
        """The names of all arguments; others are misspelt."""
        ours = inspect.signature(LanguageModel).parameters.keys()
        return {*ours, *cls.attribute_map, *vars(PreTrainedConfig()), *COMMON}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Load what `to_dict` returned.

        - `config_dict`: arguments by name, and attributes that other programs
          have added to a configuration, which it has again.
        - Returns the configuration; with `return_unused_kwargs`, also those of
          `kwargs` that are no attributes of it.
        """
        known, given = cls._known(), config_dict.items()
        loaded = super().from_dict({n: x for n, x in given if n in known}, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        for name in config_dict.keys() - known:
            setattr(config, name, config_dict[name])
        return loaded

    def language_model(self) -> LanguageModel:
        """A new model.

        - Returns a `LanguageModel` with these arguments.
        """
        names = inspect.signature(LanguageModel).parameters
        return LanguageModel(**{name: getattr(self, name) for name in names})


class FwlabCache(Cache):
    """What a `LanguageModel` carries from token to token, for `generate`.

    - `state`: as `LanguageModel.prefill` returns it; None = start of text.
    - `length`: number of tokens so far, padding included.

    transformers' own layers for linear attention do not fit: they copy
    states of constant size in place, and 0 is their empty state.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        self.length = 0

    def __len__(self) -> int:
        """Number of blocks with a state."""
        if isinstance(self.state, RowStates):
            return len(self.state.rows[0]) - 1
        return 0 if self.state is None else len(self.state) - 1

    @property
    def is_linear(self) -> list[bool]:
        """False, so that `generate` asks for the length and continues from there."""
        return [False]

    @property
    def is_initialized(self) -> bool:
        """Whether there is a state."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """False: fast weights cannot forget their last tokens."""
        return False

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 = any, at the start of text."""
        if isinstance(self.state, RowStates):
            return len(self.state.rows)
        tensors = (x for x in tree_leaves(self.state) if isinstance(x, Tensor))
        return next((len(x) for x in tensors), -1)

    def past(self) -> int | list[int]:
        """Number of real tokens so far, of all rows or of each."""
        if isinstance(self.state, RowStates):
            return [state[0] for state in self.state.rows]
        past = 0 if self.state is None else self.state[0]
        return list(past) if isinstance(past, tuple) else past

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens so far."""
        return self.length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """The length of a mask for this many more tokens, and where it begins."""
        return self.length + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The cache itself has no maximum length: -1."""
        return -1

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Whether there is a state."""
        return self.is_initialized

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: there are no earlier states to return to."""
        return False

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.length = None, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue from these rows, each of which may be taken several times."""
        rows = beam_idx.tolist()
        if isinstance(self.state, RowStates):
            self.state = RowStates([self.state.rows[row] for row in rows])
        elif self.state is not None:
            past, *parts = self.state
            if isinstance(past, tuple):
                past = tuple(past[row] for row in rows)
            parts = tree_map_only(
                Tensor, lambda x: x.index_select(0, beam_idx.to(x.device)), parts
            )
            self.state = [past, *parts]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows: their numbers, or a mask."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.batch_size)[indices.cpu()])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue from each row this many times."""
        if self.is_initialized:
            rows = torch.arange(self.batch_size)
            self.reorder_cache(rows.repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: fast weights cannot forget their last tokens."""
        raise NotImplementedError("FwlabCache: tokens cannot be removed from a state")

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            "FwlabCache: the state is that of a LanguageModel, which alone reads and "
            "updates it; there are no layers of transformers here"
        )

    update = update_conv_state = update_recurrent_state = update_indexer = _refused
    get_conv_state = get_recurrent_state = offload = prefetch = _refused
    early_initialization = activate_past_recording = _refused


class FwlabForCausalLM(PreTrainedModel, GenerationMixin):
    """A `LanguageModel` with the interface of transformers.

    - `config`: the arguments of the model.
    - `language_model`: a model with these arguments, such as a trained one;
      None = a new one.

    `generate` works with greedy search, sampling and beams, and
    `save_pretrained` and `from_pretrained` with safetensors. After `import
    fwlab.hf`, `AutoModelForCausalLM` finds the class of a saved folder.

        >>> model = FwlabForCausalLM(FwlabConfig(vocab_size=9, d_model=8, heads=2))
        >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=3).shape
        torch.Size([1, 5])
    """

    config_class = FwlabConfig
    _is_stateful = True  # `generate` refuses to take tokens back
    supports_gradient_checkpointing = True

    def __init__(
        self, config: FwlabConfig, language_model: LanguageModel | None = None
    ):
        super().__init__(config)
        self.language_model = language_model or config.language_model()
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # `forward` makes a `FwlabCache`

    @torch.no_grad()
    def _init_weights(self, module: Any) -> None:
        """Constant tables, which are in no file; the weights are made already."""
        if not module._non_persistent_buffers_set:
            return
        new = self.config.language_model()
        for name, part in self.language_model.named_modules():
            if part is module:
                for table in part._non_persistent_buffers_set:
                    getattr(part, table).copy_(getattr(new.get_submodule(name), table))

    def get_input_embeddings(self) -> Any:
        """The embeddings.

        - Returns a module, tied to the logits unless the model is not `tied`.
        """
        return self.language_model.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embeddings.

        - `value`: an `nn.Embedding`, or what is one with an adapter.
        """
        self.language_model.embedding = value  # type: ignore[assignment]
        self.language_model.vocab_size = len(value.weight)  # type: ignore[arg-type]

    def get_output_embeddings(self) -> Any:
        """The layer that computes the logits.

        - Returns a module; in a tied model, the embeddings, whose weights these are.
        """
        layer = self.language_model.to_logits
        return self.language_model.embedding if layer is None else layer

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the layer that computes the logits.

        - `new_embeddings`: an `nn.Linear` without bias; in a tied model, only the
          embeddings that it has.
        - Raises `ValueError` for others in a tied model.
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
        """Whether only the inputs of blocks are kept for the backward pass."""
        return self.language_model.checkpointing

    def _set_gradient_checkpointing(
        self,
        enable: bool = True,
        gradient_checkpointing_func: Any = checkpoint,
        every_n_layers: int = 1,
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        function = getattr(gradient_checkpointing_func, "func", checkpoint)
        if every_n_layers != 1 or function is not checkpoint:
            raise ValueError(
                "FwlabForCausalLM: expected checkpointing of every layer and no "
                f"offloading, got every_n_layers={every_n_layers} or offload=True"
            )
        if options not in ({}, {"use_reentrant": False}):
            raise ValueError(
                "FwlabForCausalLM: expected gradient_checkpointing_kwargs="
                f"{{'use_reentrant': False}} or none, got {options}"
            )
        self.language_model.checkpointing = enable

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
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
        """Logits of the next token at every position.

        - `input_ids`: `int64 [batch, time]`.
        - `attention_mask`: `[batch, past + time]`, 0 = padding, on any side.
        - `cache`: what an earlier call returned; None = start of text. Before
          transformers 5.24, its name here and in what is returned was
          `past_key_values`.
        - `labels`: `int64 [batch, time]`, usually `input_ids`: the loss is
          that of each token given those before it, without those of -100.
        - `use_cache`: return a cache; None = no.
        - `logits_to_keep`: only those of this many last tokens, or those at these
          places, `int64 [places]`; 0 = all. The loss is that of all.
        - `cu_seq_lens_q`: the borders of packed documents, as `cu_seqlens` of
          `LanguageModel`; without a cache.
        - `position_ids`: `[batch or 1, time]`, the number of real tokens before each
          one, as the model counts them itself. Where they begin again, in one row
          and without a cache, a packed document begins.
        - `output_hidden_states`: also return what goes into the first block and
          comes out of each, the last after the norm; None = as in the configuration.
        - `kwargs`: for the loss function of transformers (`num_items_in_batch`,
          `ignore_index`, `shift_labels`), and what a collator says of packed documents
          beside their borders.
        - Returns `logits`, with `labels` a `loss`, with a cache `cache`, and
          `hidden_states`, layers + 1 of `[batch, time, d_model]`.
        - Raises `TypeError` for other arguments, and `ValueError` for what this model
          cannot do: embeddings as inputs, attention weights as outputs, other
          positions, packed documents with a cache or with a mixer that cannot keep
          them apart, hidden states with a cache or of a mixer that is the whole stack.
        """
        hidden = output_hidden_states
        if hidden is None:
            hidden = self.config.output_hidden_states
        kwargs.setdefault("output_attentions", self.config.output_attentions)
        _check_arguments(kwargs, cu_seq_lens_q, position_ids)
        if cache is not None and past_key_values is not None:
            raise ValueError(
                "FwlabForCausalLM: expected cache or past_key_values, which are two "
                "names of the same, got both"
            )
        cache = past_key_values if cache is None else cache
        if cache is None and use_cache:
            cache = FwlabCache()
        if input_ids is None:
            raise ValueError("FwlabForCausalLM: expected input_ids, got none")
        mask = _check_inputs(input_ids, attention_mask, cache, logits_to_keep)
        model, time = self.language_model, input_ids.shape[1]
        if position_ids is not None:
            cu_seq_lens_q = _borders(
                position_ids, cu_seq_lens_q, input_ids, mask, cache
            )
        if cache is not None and (cu_seq_lens_q is not None or hidden):
            name = "output_hidden_states" if hidden else "cu_seq_lens_q"
            raise ValueError(
                f"FwlabForCausalLM: expected {name} without a cache, got both"
            )
        states: list[Tensor] = []
        if cache is None:
            with _recorded(model, states) if hidden else nullcontext():
                logits = model(input_ids, cu_seq_lens_q, mask)
        elif time == 1 and cache.length and mask is None:
            logits, cache.state = model.step(input_ids[:, 0], cache.state)
            logits = logits[:, None]
        else:
            one = isinstance(logits_to_keep, int) and logits_to_keep == 1
            last = one and labels is None  # a loss needs all logits
            logits, cache.state = model.prefill(
                input_ids, cache.state, key_mask=mask, last=last
            )
            logits = logits[:, None] if last else logits
        if cache is not None:
            cache.length += time
        loss = None
        if labels is not None:
            size, options = self.config.vocab_size, OF_LOSS & kwargs.keys()
            given = {name: kwargs[name] for name in options}
            loss = self.loss_function(logits, labels, vocab_size=size, **given)
        keep = logits_to_keep
        logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
        # By place: the third has another name before transformers 5.24.
        output = CausalLMOutputWithPast(loss, logits, cache)
        if hidden:
            states = [_back(x, mask) for x in states]
            output.hidden_states = (*states[:-1], model.norm(states[-1]))
        return output


def _check_arguments(
    kwargs: dict[str, Any], cu_seq_lens_q: Tensor | None, position_ids: Tensor | None
) -> None:
    """Raise for arguments of `forward` that would do nothing."""
    for name, why in REFUSED.items():
        if not (kwargs.get(name) is None or kwargs[name] is False):
            raise ValueError(f"FwlabForCausalLM: {name} cannot work, because {why}")
    if unknown := kwargs.keys() - OF_LOSS - OF_PACKING - REFUSED.keys():
        raise TypeError(
            "FwlabForCausalLM: expected arguments of forward, got "
            f"{', '.join(sorted(unknown))}"
        )
    given = [name for name in sorted(OF_PACKING) if kwargs.get(name) is not None]
    if given and cu_seq_lens_q is None and position_ids is None:
        raise ValueError(
            "FwlabForCausalLM: expected cu_seq_lens_q, the borders of packed documents, "
            f"or position_ids, got only {', '.join(given)}"
        )
    keys = kwargs.get("cu_seq_lens_k")
    if keys is not None and cu_seq_lens_q is not None and not keys.equal(cu_seq_lens_q):
        raise ValueError(
            "FwlabForCausalLM: expected cu_seq_lens_k to be equal to cu_seq_lens_q, got other values"
        )


def _check_inputs(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cache: Any,
    logits_to_keep: int | Tensor,
) -> Tensor | None:
    """The mask of these tokens, if there is padding among them; raises `ValueError`."""
    if cache is not None and not isinstance(cache, FwlabCache):
        raise TypeError(
            "FwlabForCausalLM: expected cache to be a FwlabCache, as an earlier call "
            f"returned it, got a {type(cache).__name__}"
        )
    if isinstance(logits_to_keep, int) and logits_to_keep < 0:
        raise ValueError(
            "FwlabForCausalLM: expected logits_to_keep to be 0 or more, or places, "
            f"got {logits_to_keep}"
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
    position_ids: Tensor,
    cu_seq_lens_q: Tensor | None,
    input_ids: Tensor,
    mask: Tensor | None,
    cache: FwlabCache | None,
) -> Tensor | None:
    """The borders of packed documents whose positions these are; None = one document.

    Raises `ValueError` for positions that the model does not count itself.
    """
    past = torch.as_tensor(0 if cache is None else cache.past()).view(-1, 1)
    real = torch.ones_like(input_ids) if mask is None else mask
    counted = past.to(real.device) + real.cumsum(1) - 1
    first = position_ids == 0
    borders = F.pad(first[0].nonzero()[:, 0], (0, 1), value=input_ids.shape[1])
    right = position_ids.shape in (counted.shape, counted[:1].shape)
    one = right and not ((position_ids != counted) & real.bool()).any()
    if right and not one:  # from 0 again in each document
        steps = (position_ids.diff(dim=1) == 1) | first[:, 1:]
        right = len(counted) == 1 and mask is None and bool(first[0, 0] and steps.all())
    if cu_seq_lens_q is not None:
        right = right and cu_seq_lens_q.unique().equal(borders.to(cu_seq_lens_q))
    if not right:
        raise ValueError(
            "FwlabForCausalLM: expected position_ids that count the real tokens of each "
            f"row, or of each packed document, got others, of shape "
            f"{[*position_ids.shape]}"
        )
    return borders if cu_seq_lens_q is None and not one else cu_seq_lens_q


@contextmanager
def _recorded(model: LanguageModel, states: list[Tensor]) -> Iterator[None]:
    """Append what goes into the first block, and what comes out of each."""
    if not all(isinstance(block, Block) for block in model.blocks):
        raise ValueError(
            "FwlabForCausalLM: expected output_hidden_states with a mixer of blocks, got "
            "one that replaces the whole stack"
        )
    hooks = [
        model.blocks[0].register_forward_pre_hook(lambda _, x: states.append(x[0])),
        *(
            block.register_forward_hook(lambda *call: states.append(call[2]))
            for block in model.blocks
        ),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


AutoConfig.register("fwlab", FwlabConfig, exist_ok=True)
AutoModelForCausalLM.register(FwlabConfig, FwlabForCausalLM, exist_ok=True)
# Where `Trainer` looks up whether label smoothing is that of the next token.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["fwlab"] = FwlabForCausalLM.__name__


def from_run(path: str | Path) -> tuple[FwlabForCausalLM, PreTrainedTokenizerFast]:
    """A run of `fwlab train` as a model of transformers, with its tokenizer.

    - `path`: as for `fwlab.training.load`.
    - Returns both, on the CPU. `save_pretrained` of each into one folder
      makes a folder that other programs can load after `import fwlab.hf`.
    - Raises `CheckpointError` as `fwlab.training.load` does.

    The tokenizer splits text into the characters or words of the run. It
    refuses unknown characters.
    """
    from fwlab.training import checkpoint

    run = checkpoint.load(path)
    arguments = checkpoint.model_arguments(run.config)
    config = FwlabConfig(vocab_size=len(run.vocabulary), **arguments)
    return FwlabForCausalLM(config, run.model).eval(), _tokenizer(run.vocabulary)


def _tokenizer(vocabulary: Vocabulary) -> PreTrainedTokenizerFast:
    index = {token: i for i, token in enumerate(vocabulary.vocabulary)}
    special = {"unk_token": UNKNOWN} if UNKNOWN in index else {}
    tokenizer = Tokenizer(models.WordLevel(index, **special))
    if isinstance(vocabulary, Characters):
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
    else:
        tokenizer.normalizer = normalizers.Replace("\n", f" {END} ")
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"clean_up_tokenization_spaces": False, **special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)
