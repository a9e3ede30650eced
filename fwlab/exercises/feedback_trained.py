"""A feedback transformer, trained: programs, schedules, and fair scores."""

import random
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from itertools import islice
from operator import eq, ge, gt, le, lt
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fwlab.data.programs import CLAUSES, VALUES, execute, program
from fwlab.exercises.asking import Answer, Wrong, raised
from fwlab.exercises.exercise import Exercise, Property
from fwlab.exercises.properties import agrees, exactly, shape
from fwlab.exercises.solutions import (
    curriculum,
    fair_scores,
    fool,
    interpreter,
    warm_start,
)
from fwlab.layers import FeedbackTransformer
from fwlab.models import LanguageModel

# --- interpreter -----------------------------------------------------------


def _clauses(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w[^;:]*[;:]", text))


def _texts(*texts: str) -> list[tuple[tuple[str, ...]]]:
    return [(_clauses(text),) for text in texts]


def _drawn(generator: Generator) -> dict[str, Any]:
    seed = int(torch.randint(10**6, (), generator=generator))
    tokens, *_ = program(16, 3, random.Random(seed))
    return {"clauses": _clauses(" ".join(tokens))}


def _interpreted(
    clauses: Sequence[str],
    decide: Callable[[bool], bool] = bool,
    compare: tuple[Callable[[int, int], bool], Callable[[int, int], bool]] = (lt, gt),
    limits: bool = True,
    before: bool = False,
    one: bool = False,
    lasts: bool = False,
    skipped: bool = True,
    at_condition: bool = False,
    steps: tuple[int, int] = (1, -1),
) -> Tensor:
    """The solution, with a choice of mistakes."""
    values: dict[str, int] = {}
    after, run = [], True
    for clause in clauses:
        first, *rest = clause.split()
        if first == "if":
            name, sign, limit, _ = rest
            a = values.get(name, 0)
            b = int(limit) if limit.isdigit() else values.get(limit, 0) * limits
            run = decide(compare[sign == ">"](a, b))
            after.append(a * at_condition)
            continue
        name = "x" if one else rest[0] if first == "print" else first
        old = values.get(name, 0)
        if first != "print" and run:
            change = {"++": steps[0], "--": steps[1]}.get(rest[0])
            values[name] = int(rest[1]) if change is None else old + change
        new = old if before else values.get(name, 0)
        after.append(new if run or skipped else 0)
        run = run or not lasts
    return torch.tensor(after)


INTERPRETER = Exercise(
    name="interpreter",
    notebook="14_feedback_trained",
    difficulty=2,
    importance=4,
    minutes=12,
    task="**An interpreter.** `clauses` is a program, a tuple of texts such as "
    '`"x = 3 ;"`, `"x ++ ;"`, `"x -- ;"`, `"print x ;"`, `"if x < 7 :"` and '
    '`"if x > y :"`. A statement after a condition is executed only if the condition '
    "holds. Return a tensor of integers, one for each clause: the value that the "
    "variable of the statement has afterwards; 0 at a condition, and for a variable "
    "that is not set yet.",
    reference=interpreter,
    properties=(
        shape(
            "returns an integer for each clause",
            exactly("clauses"),
            _texts("x = 3 ;", "x = 3 ; if x < 5 : x ++ ; print x ;"),
        ),
        agrees(
            "assigns, adds 1 and takes 1 away",
            exactly("clauses"),
            _texts("x = 3 ; x ++ ; x ++ ;", "x = 10 ; x -- ; x -- ; x ++ ;"),
            because="The program was {clauses}.",
            catches={
                "This gives the value before the statement. It should be the one after "
                "it.": partial(_interpreted, before=True),
                "++ and -- have changed places.": partial(_interpreted, steps=(-1, 1)),
            },
        ),
        agrees(
            "keeps a value for each variable, also while it prints",
            exactly("clauses"),
            _texts("x = 3 ; y = 8 ; x ++ ; print y ; y -- ; print x ;"),
            because="The program was {clauses}.",
            catches={
                "All variables share one value here.": partial(_interpreted, one=True)
            },
        ),
        agrees(
            "executes the statement after a condition that holds",
            exactly("clauses"),
            _texts("x = 3 ; if x < 5 : x ++ ; print x ; if x > 2 : x -- ; print x ;"),
            because="The program was {clauses}.",
            catches={
                "This skips every if, also where the condition holds.": partial(
                    _interpreted, decide=lambda holds: False
                ),
                "At a condition this gives the value of its variable. It should be 0: "
                "nothing is changed there.": partial(_interpreted, at_condition=True),
                "< and > have changed places.": partial(_interpreted, compare=(gt, lt)),
            },
        ),
        agrees(
            "skips the statement after a condition that fails, and only this one",
            exactly("clauses"),
            _texts("x = 3 ; if x > 5 : x ++ ; x ++ ; print x ; if x < 2 : x -- ;"),
            because="The program was {clauses}.",
            catches={
                "This takes every condition as true.": partial(
                    _interpreted, decide=lambda holds: True
                ),
                "After a condition that fails, nothing is executed until the next "
                "condition.": partial(_interpreted, lasts=True),
                "A statement that is skipped gives 0. Its variable still has its "
                "value.": partial(_interpreted, skipped=False),
            },
        ),
        agrees(
            "compares with numbers and with variables, and equal is neither",
            exactly("clauses"),
            _texts(
                "x = 5 ; y = 7 ; if x < y : x ++ ; if y > x : y ++ ; print x ;",
                "x = 5 ; if x < 5 : x ++ ; if x > 5 : x -- ; print x ;",
            ),
            because="The program was {clauses}.",
            catches={
                "A variable on the right of a comparison counts as 0.": partial(
                    _interpreted, limits=False
                ),
                "This compares with <= and >=.": partial(
                    _interpreted, compare=(le, ge)
                ),
            },
        ),
        agrees(
            "gives 0 for a variable that is not set",
            exactly("clauses"),
            _texts("x = 3 ; if x > 5 : y = 4 ; y = 7 ; print y ;"),
            because="The program was {clauses}. If the first assignment of y is "
            "skipped, y is not set, and may be set later.",
        ),
    ),
    hints=(
        "Go from clause to clause with a dictionary of values, and remember whether "
        "the next statement is to be executed.",
        "clause.split() gives the words: of a condition if, name, sign, limit and a "
        "colon. A limit is a number or a name.",
        "At an if, set run and append 0. At a statement, change the value if run; "
        "then run = True, and append values.get(name, 0).",
    ),
    example=_drawn,
)


# --- fool ------------------------------------------------------------------

#: Clauses of a program at most, and prints that are enough.
MOST, ENOUGH = 16, 5


def _program(answer: Answer) -> tuple[str, ...]:
    """What an answer without arguments returns."""
    try:
        result = answer()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise Wrong(f"Calling fool(): {raised(answer, error)}") from None
    if not isinstance(result, list | tuple):
        kind = type(result).__name__
        raise Wrong(f"Expected a list of clauses, got something of type {kind}.")
    return tuple(result)


def _is_written_in_clauses(
    answer: Answer, reference: Answer, generator: Generator
) -> None:
    clauses = _program(answer)
    if not 1 <= len(clauses) <= MOST:
        raise Wrong(f"Expected 1 to {MOST} clauses, got {len(clauses)}.")
    for number, clause in enumerate(clauses, 1):
        known = isinstance(clause, str) and clause in CLAUSES[10:-1]
        if not known or set(clause) & set("yzpr") - set("print"):
            raise Wrong(
                f"Clause {number} is {clause!r}. Expected one such as 'x = 3 ;', 'x ++ ;',"
                " 'print x ;' or 'if x < 7 :', with these spaces, and with x alone."
            )


def _is_legal(answer: Answer, reference: Answer, generator: Generator) -> None:
    clauses = _program(answer)
    value, run, inner = 0, True, False
    for number, clause in enumerate(clauses, 1):
        word, *rest = clause.split()
        if inner and word in ("if", "print"):
            raise Wrong(
                f"Clause {number}, {clause!r}, comes after a condition. There should "
                "be an assignment, ++ or --."
            )
        if word == "print" or word == "if" or rest[0] != "=":
            if not value:
                raise Wrong(f"At clause {number}, {clause!r}, x is not set yet.")
        elif value:
            raise Wrong(f"Clause {number}, {clause!r}, sets x again.")
        inner = word == "if"
        if inner:
            a, sign, limit = value, rest[1], int(rest[2])
            run = a < limit if sign == "<" else a > limit
            continue
        if word == "x" and run:
            step = {"++": 1, "--": -1}.get(rest[0])
            value = int(rest[1]) if step is None else value + step
        run = True
        if value not in (0, *VALUES):
            raise Wrong(f"After clause {number}, {clause!r}, x is {value}.")
    if inner:
        raise Wrong("The last clause is a condition, and nothing comes after it.")


def _fools(answer: Answer, reference: Answer, generator: Generator) -> None:
    tokens = " ".join(_program(answer)).split()
    truth, skip, take = (
        [value for value in execute(tokens, conditions) if value is not None]
        for conditions in (None, False, True)
    )
    said: dict[str, Sequence[int | None]] = {
        "skip every if": skip,
        "every if is true": take,
        "last print": [None, *truth[:-1]],
    }
    pairs = [*zip(truth, *said.values(), strict=True)]
    fooled = sum(value not in others for value, *others in pairs)
    if fooled < ENOUGH:
        right = ", ".join(
            f"{rule}: {sum(map(eq, truth, guesses))}" for rule, guesses in said.items()
        )
        raise Wrong(
            f"Prints in your program: {len(truth)}. Prints that fool all three rules: "
            f"{fooled}; at least {ENOUGH} should. Right answers of each rule: {right}."
        )


FOOL = Exercise(
    name="fool",
    notebook="14_feedback_trained",
    difficulty=3,
    importance=3,
    minutes=12,
    task="**Fool the rules.** A print *fools* a rule if the rule says another value than "
    "the interpreter does. Return a program with the one variable `x`, a list of at most "
    "16 clauses, in which at least 5 prints fool *all three* rules. In "
    '`["x = 5 ;", "if x > 4 :", "x ++ ;", "print x ;"]` the print is 6. It fools the '
    "rule that skips every `if`, which says 5, and the rule of the last print, which has "
    "nothing to repeat yet; but the rule that takes every `if` as true says 6, too. Set "
    "`x` once, keep it from 1 to 10, and put an assignment, `++` or `--` after a "
    "condition. Can you get 6?",
    reference=fool,
    properties=(
        Property("returns at most 16 clauses of the language", _is_written_in_clauses),
        Property("is a legal program", _is_legal),
        Property("has at least 5 prints that fool all three rules", _fools),
    ),
    hints=(
        "One condition has to hold and one has to fail, and both have to matter for x.",
        "Once a rule is off by one, it stays off. So put both conditions first. The "
        "rule of the last print is fooled by any change.",
        "After x = 5, an increment under a condition that holds and a decrement under one "
        "that fails leave the rules at 5 and x at 6.",
    ),
)


# --- curriculum ------------------------------------------------------------


def _grown(
    step: int,
    steps: int,
    first: int,
    last: int,
    share: float,
    late: int = 0,
    of: Callable[[float], float] = lambda g: min(1.0, g),
    to: Callable[[float], int] = round,
) -> int:
    """The solution, with a choice of mistakes."""
    return first + to((last - first) * of((step + late) / (share * steps)))


#: step, steps, first, last, share; none falls on a half.
_DRAWN = exactly("step", "steps", "first", "last", "share")

CURRICULUM = Exercise(
    name="curriculum",
    notebook="14_feedback_trained",
    difficulty=2,
    importance=3,
    minutes=8,
    task="**A curriculum.** Return how many statements the programs of a training step "
    "have, an integer. Steps are counted from 0. The first has `first` statements; from "
    "step `share * steps` on they all have `last`; in between the number grows evenly, "
    "rounded to the nearest integer.",
    reference=curriculum,
    properties=(
        shape("returns an integer", _DRAWN, [(0, 100, 2, 24, 0.8)]),
        agrees(
            "begins with as many statements as first says",
            _DRAWN,
            [(0, 100, 2, 24, 0.8), (0, 10, 5, 50, 0.5)],
            because="This is step 0 of {steps}.",
            catches={
                "This grows from 0, not from first.": (
                    lambda step, steps, first, last, share: round(
                        last * min(1.0, step / (share * steps))
                    )
                ),
                "This begins with the longest programs, and shrinks.": partial(
                    _grown, of=lambda g: 1 - min(1.0, g)
                ),
                "This counts steps from 1. The first one is step 0.": partial(
                    _grown, late=1
                ),
                "The programs have full length in every step.": partial(
                    _grown, of=lambda g: 1.0
                ),
            },
        ),
        agrees(
            "has as many as last says at share * steps, and from there on",
            _DRAWN,
            [(80, 100, 2, 24, 0.8), (95, 100, 2, 24, 0.8), (9, 10, 5, 50, 0.5)],
            because="This is step {step} of {steps}, and share is {share}.",
            catches={
                "Programs never stop growing: step / (share * steps) goes beyond "
                "1.": partial(_grown, of=lambda g: g),
                "share is not used: this grows until the end of "
                "training.": lambda step, steps, first, last, share: _grown(
                    step, steps, first, last, 1.0
                ),
                "This adds all of last to first. It should grow by the "
                "difference.": lambda step, steps, first, last, share: _grown(
                    step, steps, first, last + first, share
                ),
                "The length jumps from first to last. It should grow in "
                "between.": partial(_grown, of=lambda g: float(g > 1)),
            },
        ),
        agrees(
            "grows evenly in between",
            _DRAWN,
            [
                *((step, 100, 2, 24, 0.8) for step in (1, 7, 30, 41, 79)),
                (3, 10, 5, 50, 0.5),
                (20, 50, 4, 30, 1.0),
            ],
            because="This is step {step} of {steps}, from {first} to {last}, and share "
            "is {share}.",
            catches={
                "This rounds down. It should be the nearest integer.": partial(
                    _grown, to=int
                ),
                "The length grows by a factor, not evenly.": (
                    lambda step, steps, first, last, share: round(
                        first * (last / first) ** min(1.0, step / (share * steps))
                    )
                ),
            },
        ),
    ),
    hints=(
        "Which share of the growth is done? 0 at step 0, 1 at step share * steps, and "
        "never more.",
        "done = min(1, step / (share * steps)). How far is it from first to last?",
        "first + round((last - first) * done).",
    ),
    example=lambda generator: dict(
        zip(
            ("step", "steps", "first", "last", "share"),
            (int(torch.randint(100, (), generator=generator)), 100, 2, 24, 0.8),
            strict=True,
        )
    ),
)


# --- warm_start ------------------------------------------------------------

_PARTS = ("embedding", "norm", "blocks")


def _pair(
    generator: Generator, differ: tuple[str, ...] = _PARTS, dropout: float = 0.0
) -> dict[str, Any]:
    """Two models that differ in these parts alone."""
    old, new = (
        LanguageModel(9, mixer, 2, 2, 8, max_len=6, dropout=dropout)
        for mixer in ("softmax", "feedback")
    )
    with torch.no_grad():
        for x in old.parameters():
            x.copy_(torch.randn(x.shape, generator=generator))
        new.start_from(old)
        for name in differ:
            for x in getattr(new, name).parameters():
                x.copy_(torch.randn(x.shape, generator=generator))
    return {
        "new": new,
        "old": old,
        "tokens": torch.randint(9, (3, 6), generator=generator),
    }


def _started(
    new: LanguageModel, old: LanguageModel, tokens: Tensor, parts: Sequence[str]
) -> Any:
    """The solution, with some of its parts."""
    with torch.no_grad():
        if "blocks" in parts:
            new.blocks[0] = FeedbackTransformer.from_transformer(old)
        for name in ("embedding", "norm"):
            if name in parts:
                getattr(new, name).load_state_dict(getattr(old, name).state_dict())
        return new.eval()(tokens)


def _started_copy(new: LanguageModel, old: LanguageModel, tokens: Tensor) -> Tensor:
    """The solution, which changes its argument, on a copy of it."""
    logits: Tensor = warm_start(deepcopy(new), old, tokens)
    return logits


WARM_START = Exercise(
    name="warm_start",
    notebook="14_feedback_trained",
    difficulty=2,
    importance=4,
    minutes=10,
    task="**A warm start.** `new` is a `LanguageModel` with feedback, and `old` a trained "
    "one of the same sizes with softmax attention. Both have an `embedding`, layers in "
    "`blocks`, and a final `norm`. Give `new` the weights of `old` in all three. The "
    "layers of `new` are all in one module, `new.blocks[0]`, and their weights have other "
    "names than those of `old`: `FeedbackTransformer.from_transformer(old)` returns such "
    "a module with the weights of `old`. Return the logits of `new` for `tokens` "
    "`[batch, time]`, `[batch, time, vocabulary]`, as for a test: without dropout.",
    reference=_started_copy,
    properties=(
        shape("returns logits for each token", _pair),
        agrees(
            "has the embedding of the trained model",
            _pair,
            [(("embedding",),)],
            because="Here the models had different embeddings, and all else was equal.",
            catches={
                "new is as it was: nothing was copied.": partial(_started, parts=()),
                "Only the stack was copied. The embedding belongs to the model around "
                "it.": partial(_started, parts=("blocks",)),
                "The embedding was not copied.": partial(
                    _started, parts=("blocks", "norm")
                ),
                "These are the logits of old. It has the weights, but no "
                "feedback.": lambda new, old, tokens: old.eval()(tokens),
            },
        ),
        agrees(
            "has its final norm",
            _pair,
            [(("norm",),)],
            because="Here the models had different final norms, and all else was equal.",
            catches={
                "The final norm was not copied.": partial(
                    _started, parts=("blocks", "embedding")
                )
            },
        ),
        agrees(
            "has its stack",
            _pair,
            [(("blocks",),), (_PARTS,)],
            because="Here the models had different stacks.",
            catches={
                "The stack was not copied: new has the embedding and the norm "
                "alone.": partial(_started, parts=("embedding", "norm"))
            },
        ),
        agrees(
            "is judged without dropout",
            _pair,
            [(_PARTS, 0.5)],
            because="The models came with dropout, and in training mode: new.eval() "
            "switches it off.",
        ),
    ),
    hints=(
        "new.embedding.load_state_dict(old.embedding.state_dict()) is the first part of "
        "three.",
        "The second is norm, in the same way. The layers of old have other names for "
        "their weights, so the third part goes through from_transformer.",
        "stack = FeedbackTransformer.from_transformer(old), then "
        "new.blocks[0].load_state_dict(stack.state_dict()); last, new.eval()(tokens).",
    ),
    example=_pair,
)


# --- fair_scores -----------------------------------------------------------


def _model(factor: int) -> Callable[[Tensor], Tensor]:
    """A model that answers each token with a multiple of it."""

    def model(tokens: Tensor) -> Tensor:
        return F.one_hot(factor * tokens % 7, 7).double()

    return model


def _judged(
    generator: Generator, count: int = 16, same: bool = False, ragged: bool = False
) -> dict[str, Any]:
    """`ragged`: the parts of four programs have unequal numbers of labels."""
    tokens = torch.randint(7, (count, 5), generator=generator)
    noise = torch.randint(7, (count, 5), generator=generator)
    often = torch.rand(count, 5, generator=generator) < 0.5
    labels = torch.where(often, 3 * tokens % 7, noise)
    labels[:, 0] = -1
    if ragged:
        rows = torch.arange(count)[:, None]
        labels = labels.masked_fill((rows // 4 % 2 == 0) & (rows % 4 > 0), -1)
    first, second = _model(3), _model(3 if same else 2)
    return {
        "first": first,
        "second": first if same else second,
        "tokens": tokens,
        "labels": labels,
    }


def _scored(
    first: Answer,
    second: Answer,
    tokens: Tensor,
    labels: Tensor,
    shared: bool = False,
    parts: int = 2,
    of_means: bool = False,
    asked: int = 0,
) -> Tensor:
    """The solution, with a choice of mistakes.

    - `shared`: the second model goes on where the first has stopped.
    - `parts`: of four programs, for each model.
    - `of_means`: a mean over the means of the parts.
    - `asked`: labels below count as no question.
    """
    cut = [*zip(tokens.split(4), labels.split(4), strict=True)]
    ahead, scores = iter(cut), []
    for model in (first, second):
        own = islice(ahead if shared else iter(cut), parts)
        right = [(model(x).argmax(-1) == y)[y >= asked].double() for x, y in own]
        means = torch.stack([part.mean() for part in right])
        scores.append(100 * (means if of_means else torch.cat(right)).mean())
    return torch.stack(scores)


_ALL = 10**6

FAIR_SCORES = Exercise(
    name="fair_scores",
    notebook="14_feedback_trained",
    difficulty=3,
    importance=5,
    minutes=10,
    task="**Find the bugs.** `first` and `second` are functions from `tokens` `[programs, "
    "time]` to logits `[programs, time, vocabulary]`. For both, return the right "
    "answers in percent, `[2]`, over all `labels` `[programs, time]` that ask for "
    "something; -1 asks for nothing. Compute with a few programs at a time, as the code "
    "does. It has more than one mistake.",
    start="""\
def fair_scores(first, second, tokens, labels):
    parts, scores = zip(tokens.split(4), labels.split(4)), []
    for model in (first, second):
        shares = []
        for x, y in parts:
            right = model(x).argmax(-1) == y
            shares.append(right[y >= 0].double().mean())
            if len(shares) == 2:
                break  # enough for a score
        scores.append(100 * torch.stack(shares).mean())
    return torch.stack(scores)""",
    reference=fair_scores,
    properties=(
        shape("returns two numbers", _judged, [16, 24]),
        agrees(
            "gives a model that is judged twice the same score twice",
            _judged,
            [(16, True), (24, True)],
            of=lambda y, *_: y[0] - y[1],
            because="first and second were the same function, and the difference of "
            "their scores should be 0. Do both see the same programs?",
            catches={
                "This is the function as you found it.": partial(
                    _scored, shared=True, of_means=True
                ),
                "The second model still goes on where the first has stopped: zip can be "
                "used up.": partial(_scored, shared=True),
            },
        ),
        agrees(
            "judges both on all programs",
            _judged,
            [16, 12, 24],
            because="There were {count} programs.",
            catches={
                "Both see the same programs now, but only the first eight.": (
                    _scored,
                    partial(_scored, of_means=True),
                ),
                "Only the first four programs are judged.": partial(_scored, parts=1),
                "A label of -1 asks for nothing, but is counted as a wrong "
                "answer.": partial(_scored, parts=_ALL, asked=-1),
            },
        ),
        agrees(
            "counts each answer once",
            _judged,
            [(16, False, True), (22, False, True)],
            because="Parts of four programs had different numbers of labels. Is this a "
            "mean over answers, or over means?",
            catches={
                "This is a mean over the means of the parts: an answer in a part with "
                "few labels counts more.": partial(_scored, parts=_ALL, of_means=True)
            },
        ),
    ),
    hints=(
        "Give it the same model twice: fair_scores(m, m, tokens, labels). Which programs "
        "does each of the two see?",
        "zip(...) is an iterator, and the second model goes on where the first has "
        "stopped. Make it again for each model, or a list. And which programs come "
        "after the break?",
        "Collect the right answers of all parts, and take one mean of them all: "
        "100 * torch.cat(rights).mean().",
    ),
    example=partial(_judged, ragged=True),
)


EXERCISES = {
    each.name: each for each in (INTERPRETER, FOOL, CURRICULUM, WARM_START, FAIR_SCORES)
}
