"""Feedback trained."""

import random
import re
from collections import defaultdict
from functools import partial, wraps

import torch
from torch.nn import functional as F

from fwlab.data.programs import CLAUSES, VALUES, execute, program
from fwlab.exercises.answers import Wrong, ask, raised
from fwlab.exercises.notation import exercise
from fwlab.exercises.properties import exactly
from fwlab.layers import FeedbackTransformer
from fwlab.models import LanguageModel

# --- interpreter -----------------------------------------------------------


def _clauses(text):
    return tuple(re.findall(r"\w[^;:]*[;:]", text))


def _texts(*texts):
    return [(_clauses(text),) for text in texts]


def _drawn(generator):
    seed = int(torch.randint(10**6, (), generator=generator))
    tokens, *_ = program(16, 3, random.Random(seed))
    return {"clauses": _clauses(" ".join(tokens))}


@exercise(exactly("clauses"), example=_drawn, difficulty=2, importance=4, minutes=12)
def interpreter(clauses):
    """
    **An interpreter.** `clauses` is a program, a tuple of texts such as `"x = 3 ;"`,
    `"x ++ ;"`, `"x -- ;"`, `"print x ;"`, `"if x < 7 :"` and `"if x > y :"`. A
    statement after a condition is executed only if the condition holds. Return a tensor
    of integers, one for each clause: the value that the variable of the statement has
    afterwards; 0 at a condition, and for a variable that is not set yet.

    ✓ returns an integer for each clause
        shape(*_texts("x = 3 ;", "x = 3 ; if x < 5 : x ++ ; print x ;"))
    ✓ assigns, adds 1 and takes 1 away
        agrees(*_texts("x = 3 ; x ++ ; x ++ ;", "x = 10 ; x -- ; x -- ; x ++ ;"))
    ! The program was {clauses}.
    ✗ This gives the value before the statement. It should be the one after it.
        name = rest[0] if first == "print" else first ->
          name = rest[0] if first == "print" else first; old = values.get(name, 0)
          ; after.append(values.get(name, 0)) -> after.append(old)
    ✗ ++ and -- have changed places.
        "++": 1, "--": -1 -> "++": -1, "--": 1
    ✓ keeps a value for each variable, also while it prints
        agrees(*_texts("x = 3 ; y = 8 ; x ++ ; print y ; y -- ; print x ;"))
    ! The program was {clauses}.
    ✗ All variables share one value here.
        name = rest[0] if first == "print" else first -> name = "x" ; {}, [] -> defaultdict(int), []
    ✓ executes the statement after a condition that holds
        agrees(*_texts("x = 3 ; if x < 5 : x ++ ; print x ; if x > 2 : x -- ; print x ;"))
    ! The program was {clauses}.
    ✗ This skips every if, also where the condition holds.
        run = a < b if sign == "<" else a > b -> run = False ; {}, [] -> defaultdict(int), []
    ✗ At a condition this gives the value of its variable. It should be 0: nothing is
      changed there.
        after.append(0) -> after.append(a)
    ✗ < and > have changed places.
        sign == "<" -> sign == ">" ; {}, [] -> defaultdict(int), []
    ✓ skips the statement after a condition that fails, and only this one
        agrees(*_texts("x = 3 ; if x > 5 : x ++ ; x ++ ; print x ; if x < 2 : x -- ;"))
    ! The program was {clauses}.
    ✗ This takes every condition as true.
        run = a < b if sign == "<" else a > b -> run = True
    ✗ After a condition that fails, nothing is executed until the next condition.
        run = True  # a -> # a ; {}, [] -> defaultdict(int), []
    ✗ A statement that is skipped gives 0. Its variable still has its value.
        run = True  # a -> # a ; get(name, 0)) -> get(name, 0) * run); run = True
    ✓ compares with numbers and with variables, and equal is neither
        agrees(*_texts(
            "x = 5 ; y = 7 ; if x < y : x ++ ; if y > x : y ++ ; print x ;",
            "x = 5 ; if x < 5 : x ++ ; if x > 5 : x -- ; print x ;",
        ))
    ! The program was {clauses}.
    ✗ A variable on the right of a comparison counts as 0.
        else values[limit] -> else 0 ; {}, [] -> defaultdict(int), []
    ✗ This compares with <= and >=.
        a < b -> a <= b ; a > b -> a >= b
    ✓ gives 0 for a variable that is not set
        agrees(*_texts("x = 3 ; if x > 5 : y = 4 ; y = 7 ; print y ;"))
    ! The program was {clauses}. If the first assignment of y is skipped, y is not set,
      and may be set later.
    ? Go from clause to clause with a dictionary of values, and remember whether the
      next statement is to be executed.
    ? clause.split() gives the words: of a condition if, name, sign, limit and a colon.
      A limit is a number or a name.
    ? At an if, set run and append 0. At a statement, change the value if run; then run
      = True, and append values.get(name, 0).
    """
    values, after, run = {}, [], True
    for clause in clauses:
        first, *rest = clause.split()
        if first == "if":
            name, sign, limit, _ = rest
            a = values[name]
            b = int(limit) if limit.isdigit() else values[limit]
            run = a < b if sign == "<" else a > b
            after.append(0)
            continue
        name = rest[0] if first == "print" else first
        if run and first != "print":
            change = {"++": 1, "--": -1}.get(rest[0])
            values[name] = values[name] + change if change else int(rest[1])
        run = True  # a condition is for one statement
        after.append(values.get(name, 0))
    return torch.tensor(after)


# --- fool ------------------------------------------------------------------

#: Clauses of a program at most, and prints that are enough.
MOST, ENOUGH = 16, 5


def _program(answer):
    """Return the result of an answer without arguments."""
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


def _is_written_in_clauses(answer, reference, generator):
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


def _is_legal(answer, reference, generator):
    clauses = _program(answer)
    value, run, inner = 0, True, False
    for number, clause in enumerate(clauses, 1):
        word, *rest = clause.split()
        if inner and word in ("if", "print"):
            raise Wrong(
                f"Clause {number}, {clause!r}, comes after a condition. There should "
                "be 'x ++ ;' or 'x -- ;'."
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


def _fools(answer, reference, generator):
    tokens = " ".join(_program(answer)).split()
    truth, skip, take = (
        [value for value in execute(tokens, conditions) if value is not None]
        for conditions in (None, False, True)
    )
    said = {
        "skip every if": skip,
        "every if is true": take,
        "last print": [0, *truth][: len(truth)],  # first, there is none to repeat
    }
    pairs = [*zip(truth, *said.values(), strict=True)]
    fooled = sum(value not in others for value, *others in pairs)
    if fooled < ENOUGH:
        right = ", ".join(
            f"{rule}: {sum(x == y for x, y in zip(truth, guesses, strict=True))}"
            for rule, guesses in said.items()
        )
        raise Wrong(
            f"Prints in your program: {len(truth)}. Prints that fool all three rules: "
            f"{fooled}; at least {ENOUGH} should. Right answers of each rule: {right}."
        )


@exercise(difficulty=3, importance=3, minutes=12)
def fool():
    """
    **Fool the rules.** A print *fools* a rule if the rule says another value than the
    interpreter does. Return a program with the one variable `x`, a list of at most 16
    clauses, in which at least 5 prints fool *all three* rules. In `["x = 5 ;", "if x >
    4 :", "x ++ ;", "print x ;"]` the print is 6. It fools the rule that skips every
    `if`, which says 5, and the rule of the last print, which has nothing to repeat yet;
    but the rule that takes every `if` as true says 6, too. Set `x` once, keep it from 1
    to 10, and put `x ++ ;` or `x -- ;` after each condition. Can you get 6?

    ✓ returns at most 16 clauses of the language
        _is_written_in_clauses
    ✓ is a legal program
        _is_legal
    ✓ has at least 5 prints that fool all three rules
        _fools
    ? One condition has to hold and one has to fail, and both have to matter for x.
    ? Once a rule is off by one, it stays off. So put both conditions first. The rule of
      the last print is fooled by any change.
    ? After x = 5, an increment under a condition that holds and a decrement under one
      that fails leave the rules at 5 and x at 6.
    """
    start = ["x = 5 ;", "if x > 4 :", "x ++ ;", "if x > 9 :", "x -- ;", "print x ;"]
    return start + ["x ++ ;", "print x ;"] * 4 + ["x -- ;", "print x ;"]


# --- curriculum ------------------------------------------------------------

#: Draws nothing. In the checks below no number falls on a half.
_given = exactly("step", "steps", "first", "last", "share")


def _any_step(generator):
    step = int(torch.randint(100, (), generator=generator))
    return _given(generator, step, 100, 2, 24, 0.8)


@exercise(_given, example=_any_step, difficulty=2, importance=3, minutes=8)
def curriculum(step, steps, first, last, share):
    """
    **A curriculum.** Return how many statements the programs of a training step have,
    an integer. Steps are counted from 0. The first has `first` statements; from step
    `share * steps` on they all have `last`; in between the number grows evenly, rounded
    to the nearest integer.

    ✓ returns an integer
        shape((0, 100, 2, 24, 0.8))
    ✓ begins with as many statements as first says
        agrees((0, 100, 2, 24, 0.8), (0, 10, 5, 50, 0.5))
    ! This is step 0 of {steps}.
    ✗ This grows from 0, not from first.
        first + round((last - first) * done) -> round(last * done)
    ✗ This begins with the longest programs, and shrinks.
        * done -> * (1 - done)
    ✗ This counts steps from 1. The first one is step 0.
        step=step + 1
    ✗ The programs have full length in every step.
        * done ->
    ✓ has as many as last says at share * steps, and from there on
        agrees((80, 100, 2, 24, 0.8), (95, 100, 2, 24, 0.8), (9, 10, 5, 50, 0.5))
    ! This is step {step} of {steps}, and share is {share}.
    ✗ Programs never stop growing: step / (share * steps) goes beyond 1.
        min(1, step / (share * steps)) -> step / (share * steps)
    ✗ share is not used: this grows until the end of training.
        share=1.0
    ✗ This adds all of last to first. It should grow by the difference.
        last=last + first
    ✗ The length jumps from first to last. It should grow in between.
        min(1, step / (share * steps)) -> step > share * steps
    ✓ grows evenly in between
        agrees(
            *((step, 100, 2, 24, 0.8) for step in (1, 7, 30, 41, 79)),
            (3, 10, 5, 50, 0.5),
            (20, 50, 4, 30, 1.0),
        )
    ! This is step {step} of {steps}, from {first} to {last}, and share is {share}.
    ✗ This rounds down. It should be the nearest integer.
        round( -> int(
    ✗ The length grows by a factor, not evenly.
        first + round((last - first) * done) -> round(first * (last / first) ** done)
    ? Which share of the growth is done? 0 at step 0, 1 at step share * steps, and never
      more.
    ? done = min(1, step / (share * steps)). How far is it from first to last?
    ? first + round((last - first) * done).
    """
    done = min(1, step / (share * steps))
    return first + round((last - first) * done)


# --- warm_start ------------------------------------------------------------


def _pair(generator, differ=("embedding", "norm", "blocks"), dropout=0.0):
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


def _shares_nothing(answer, reference, generator):
    inputs, used = _pair(generator), []

    @wraps(answer)
    def kept(new, old, tokens):
        used.append((new, old))
        return answer(new, old, tokens)

    with torch.no_grad():
        right = reference(*inputs.values())
    ask(kept, right, **inputs)
    new, old = used[0]
    with torch.no_grad():
        for x in new.parameters():  # as a step of training does
            x += 1
    for name, x in inputs["old"].named_parameters():
        if not torch.equal(x, old.get_parameter(name)):
            raise Wrong(
                f"new shares {name} with old: when new is trained, old changes with "
                "it. Copy the numbers, as load_state_dict does; do not hand over "
                "modules or parameters."
            )


@exercise(
    _pair,
    difficulty=2,
    importance=4,
    minutes=10,
)
def warm_start(new, old, tokens):
    """
    **A warm start.** `new` is a `LanguageModel` with feedback, and `old` a trained one
    of the same sizes with softmax attention. Both have an `embedding`, layers in
    `blocks`, and a final `norm`. Give `new` copies of the weights of `old` in all
    three. The layers of `new` are all in one module, `new.blocks[0]`, and their weights
    have other names than those of `old`: `FeedbackTransformer.from_transformer(old)`
    returns such a module with the weights of `old`. Return the logits of `new` for
    `tokens` `[batch, time]`, `[batch, time, vocabulary]`, as for a test: without
    dropout.

    ✓ returns logits for each token
        shape()
    ✓ has the embedding of the trained model
        agrees((("embedding",),))
    ! Here the models had different embeddings, and all else was equal.
    ✗ new is as it was: nothing was copied.
        new.eval()(tokens)
    ✗ Only the stack was copied. The embedding belongs to the model around it.
        new.embedding.load_state_dict(old.embedding.state_dict()) ->
          ; new.norm.load_state_dict(old.norm.state_dict()) ->
    ✗ The embedding was not copied.
        new.embedding.load_state_dict(old.embedding.state_dict()) ->
    ✗ These are the logits of old. It has the weights, but no feedback.
        old.eval()(tokens)
    ✓ has its final norm
        agrees((("norm",),))
    ! Here the models had different final norms, and all else was equal.
    ✗ The final norm was not copied.
        new.norm.load_state_dict(old.norm.state_dict()) ->
    ✓ has its stack
        agrees((("blocks",),), ())
    ! Here the models had different stacks.
    ✗ The stack was not copied: new has the embedding and the norm alone.
        new.blocks[0].load_state_dict(stack.state_dict()) ->
    ✓ is judged without dropout
        agrees({"dropout": 0.5})
    ! The models came with dropout, and in training mode: new.eval() switches it off.
    ✓ has weights of its own: training new leaves old as it is
        _shares_nothing
    ? new.embedding.load_state_dict(old.embedding.state_dict()) is the first part of
      three.
    ? The second is norm, in the same way. The layers of old have other names for their
      weights, so the third part goes through from_transformer.
    ? stack = FeedbackTransformer.from_transformer(old), then
      new.blocks[0].load_state_dict(stack.state_dict()); last, new.eval()(tokens).
    """
    stack = FeedbackTransformer.from_transformer(old)
    new.blocks[0].load_state_dict(stack.state_dict())
    new.embedding.load_state_dict(old.embedding.state_dict())
    new.norm.load_state_dict(old.norm.state_dict())
    return new.eval()(tokens)


# --- fair_scores -----------------------------------------------------------


def _model(factor):
    """Make a model that answers each token with a multiple of it."""

    def model(tokens):
        return F.one_hot(factor * tokens % 7, 7).double()

    return model


def _judged(generator, count=16, same=False, ragged=False):
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


_ragged = partial(_judged, ragged=True)

START = """\
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
    return torch.stack(scores)"""


@exercise(_judged, example=_ragged, difficulty=3, importance=5, minutes=10, start=START)
def fair_scores(first, second, tokens, labels):
    """
    **Find the bugs.** `first` and `second` are functions from `tokens` `[programs,
    time]` to logits `[programs, time, vocabulary]`. For both, return the right answers
    in percent, `[2]`, over all `labels` `[programs, time]` that ask for something; -1
    asks for nothing. Compute with a few programs at a time, as the code does. It has
    more than one mistake.

    ✓ returns two numbers
        shape(16, 24)
    ✓ gives a model that is judged twice the same score twice
        agrees((16, True), (24, True), of=lambda y, *_: y[0] - y[1])
    ! first and second were the same function, and the difference of their scores should
      be 0. Do both see the same programs?
    ✗ This is the function as you found it.
        start:
    ✗ The second model still goes on where the first has stopped: zip can be used up.
        start: .double().mean()) -> .double()) ; torch.stack(shares) -> torch.cat(shares)
    ✓ judges both on all programs
        agrees(16, 12, 24)
    ! There were {count} programs.
    ✗ Both see the same programs now, but only the first eight.
        len(tokens), 4 -> 8, 4
        start: zip(tokens.split(4), labels.split(4)) -> [*zip(tokens.split(4), labels.split(4))]
    ✗ These are shares: percent are 100 times as much.
        100 * torch.cat -> torch.cat
    ✗ Only the first four programs are judged.
        len(tokens), 4 -> 4, 4
    ✗ A label of -1 asks for nothing, but is counted as a wrong answer.
        y >= 0 -> y >= -1
    ✓ counts each answer once
        agrees((16, False, True), (22, False, True))
    ! Parts of four programs had different numbers of labels. Is this a mean over
      answers, or over means?
    ✗ This is a mean over the means of the parts: an answer in a part with few labels
      counts more.
        [y >= 0]) -> [y >= 0].double().mean()[None])
    ? Give it the same model twice: fair_scores(m, m, tokens, labels). Which programs
      does each of the two see?
    ? zip(...) is an iterator, and the second model goes on where the first has stopped.
      Make it again for each model, or a list. And which programs come after the break?
    ? Collect the right answers of all parts, and take one mean of them all: 100 *
      torch.cat(rights).mean().
    """
    scores = []
    for model in (first, second):
        right = []
        for i in range(0, len(tokens), 4):  # from the first program, for both models
            x, y = tokens[i : i + 4], labels[i : i + 4]
            right.append((model(x).argmax(-1) == y)[y >= 0])
        scores.append(100 * torch.cat(right).double().mean())
    return torch.stack(scores)
