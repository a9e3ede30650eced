"""Both ways between fwlab and Hugging Face's transformers.

`patch` lets the models of transformers compute their delta rules with fwlab.
`FwlabForCausalLM` gives a language model of fwlab the interface of
transformers.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fwlab import ops
from fwlab.data.vocabulary import END, UNKNOWN, Characters, Vocabulary
from fwlab.models import LanguageModel
from fwlab.models.language_model import RowStates

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
    from transformers.utils.generic import can_return_tuple
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f'fwlab.hf needs the package {error.name}: pip install "fwlab[hf]"',
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
    "torch_chunk_gated_delta_rule": "gated_delta_rule",
    "torch_recurrent_gated_delta_rule": "gated_delta_rule",
    "chunk_kimi_delta_attention": "kimi_delta_rule",
    "recurrent_kimi_delta_attention": "kimi_delta_rule",
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
        ours = functools.partial(_compute, ops.TABLE[RULES[name]])
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

    A state of theirs is `[batch, heads, key, value]`, the transpose of ours.
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
    shape = (len(v), *v.shape[2:], k.shape[-1])
    if v.shape[1] == 1 and documents is None and rule.steps_from(W, v, shape, False):
        y, W = rule.step(q, k, v, gates, W, False)
        y = y * scale
    else:
        options = {"scale": scale, "cu_seqlens": documents, "state": W}
        y = rule(q, k, v, gates, return_state=output_final_state, **options)
        y, W = y if output_final_state else (y, None)
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


class FwlabConfig(PreTrainedConfig):
    """The arguments of a `LanguageModel`, as a configuration of transformers.

    - `vocab_size`: number of tokens, at least 1.
    - `kwargs`: the other arguments of `LanguageModel`, by name.
    - Raises `TypeError` for a `mixer` that is not named.

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
    }

    def __init__(self, vocab_size: int = 256, **kwargs: Any):
        parameters = inspect.signature(LanguageModel).parameters.items()
        usual = {name: x.default for name, x in parameters}
        super().__init__(**usual | kwargs | {"vocab_size": vocab_size})
        names = self.mixer if isinstance(self.mixer, list | tuple) else [self.mixer]
        if not all(isinstance(name, str) for name in names):
            raise TypeError(
                "FwlabConfig: expected mixer to be a name or several, which a file "
                f"can hold, got {self.mixer!r}"
            )

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

    @property
    def is_linear(self) -> list[bool]:
        """False, so that `generate` asks for the length and continues from there."""
        return [False]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens so far."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """The cache itself has no maximum length: -1."""
        return -1

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

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: fast weights cannot forget their last tokens."""
        raise NotImplementedError("FwlabCache: tokens cannot be removed from a state")


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

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: FwlabCache | None = None,
        labels: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
        past_key_values: FwlabCache | None = None,
        cu_seq_lens_q: Tensor | None = None,
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
        - `use_cache`: return a cache.
        - `logits_to_keep`: only those of this many last tokens; 0 = all.
        - `cu_seq_lens_q`: the borders of packed documents, as `cu_seqlens` of
          `LanguageModel`; without a cache.
        - `kwargs`: for the loss function of transformers.
        - Returns `logits`, with `labels` a `loss`, with a cache `cache`.
        - Raises `ValueError` for `cu_seq_lens_q` with a cache, or with a mixer
          that cannot keep documents apart.
        """
        model, time = self.language_model, input_ids.shape[1]
        cache = past_key_values if cache is None else cache
        mask = None
        if attention_mask is not None and not attention_mask[:, -time:].all():
            mask = attention_mask[:, -time:].bool()
        if cache is None and use_cache:
            cache = FwlabCache()
        if cache is None:
            logits = model(input_ids, cu_seq_lens_q, mask)
        elif cu_seq_lens_q is not None:
            raise ValueError(
                "FwlabForCausalLM: expected cu_seq_lens_q without a cache, got both"
            )
        elif time == 1 and cache.length and mask is None:
            logits, cache.state = model.step(input_ids[:, 0], cache.state)
            logits = logits[:, None]
        else:
            last = logits_to_keep == 1
            logits, cache.state = model.prefill(
                input_ids, cache.state, key_mask=mask, last=last
            )
            logits = logits[:, None] if last else logits
        if cache is not None:
            cache.length += time
        logits = logits[:, -logits_to_keep:]
        loss = None
        if labels is not None:
            size = self.config.vocab_size
            loss = self.loss_function(logits, labels, vocab_size=size, **kwargs)
        # By place: the third has another name before transformers 5.24.
        return CausalLMOutputWithPast(loss, logits, cache)


AutoConfig.register("fwlab", FwlabConfig, exist_ok=True)
AutoModelForCausalLM.register(FwlabConfig, FwlabForCausalLM, exist_ok=True)


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
