"""Questions to predict before a result is shown."""

from fwlab.exercises.exercise import Question

QUESTIONS = {
    question.name: question
    for question in (
        Question(
            name="two_pairs",
            text="W holds two pairs whose keys are orthogonal and of length 1. What "
            "does reading the first key return?",
            choices=("v1", "v1 + v2", "the mean of v1 and v2"),
            truth="v1",
            because="W k1 = v1 (k1 · k1) + v2 (k2 · k1), and k2 · k1 is 0.",
            tempting={
                "v1 + v2": "Both values are in W, but each under its own key: k2 · k1 "
                "is 0, so v2 does not answer",
                "the mean of v1 and v2": "Nothing is averaged: each value is weighted "
                "by the product of its key with k1, which is 1 and 0",
            },
        ),
        Question(
            name="crosstalk",
            text="Eight pairs are written under random keys of width 8 and length 1. "
            "How large is the squared error of reading one of them, relative to the "
            "squared length of a value?",
            truth=0.875,
            tolerance=0.1,
            because="Each of the 7 other values comes in with the weight (k_j · k)², "
            "which is 1/8 on average.",
            tempting={
                0.0: "A matrix of width 8 has room for eight pairs, but only if their "
                "keys are orthogonal; random ones are not",
            },
        ),
        Question(
            name="same_key",
            text="The memory adds up all pairs. A key is written with v1, and later "
            "again with v2. What does reading it return?",
            choices=("v1", "v2", "v1 + v2", "the mean of v1 and v2"),
            truth="v1 + v2",
            because="A sum forgets nothing, so the old value is still there.",
            tempting={
                "v2": "That is what you would want from a memory. But adding a pair "
                "removes nothing",
                "v1": "Nothing protects the first value: v2 is added to it",
                "the mean of v1 and v2": "There is no division in W + v k^T",
            },
        ),
    )
}
"""Every question by name."""
