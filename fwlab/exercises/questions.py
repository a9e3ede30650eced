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
                "is 0, so v2 gets the weight 0",
                "the mean of v1 and v2": "Nothing is averaged: each value is weighted "
                "by the product of its key with k1, which is 1 for v1 and 0 for v2",
            },
        ),
        Question(
            name="crosstalk",
            text="Eight pairs are written under random keys of width 8 and length 1. "
            "How large is the squared error of reading one of them, relative to the "
            "squared length of a value?",
            truth=0.875,
            tolerance=0.1,
            because="Each of the 7 other values adds (k_j · k)² times its squared "
            "length, and (k_j · k)² is 1/8 on average.",
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
                "v2": "That is what a good memory would return. But adding a pair "
                "removes nothing",
                "v1": "Nothing protects the first value: v2 is added to it",
                "the mean of v1 and v2": "There is no division in W + v k^T",
            },
        ),
        Question(
            name="recall_state",
            text="A fast weight memory with keys and values of width 64 has read 1000 "
            "tokens. How many numbers does W hold?",
            truth=4096.0,
            tolerance=0.5,
            because="W is 64 times 64, however many tokens it has read.",
            tempting={
                64000.0: "That would be one vector for every token",
                128000.0: "That is the cache of softmax attention: a key and a value "
                "for every token",
            },
        ),
        Question(
            name="recall_z",
            text="What does z add up in linear attention?",
            choices=(
                "the features of the keys",
                "the values",
                "the features of the queries",
            ),
            truth="the features of the keys",
            because="Then z · phi(q) is the sum of all weights, the divisor in Eq. 19.",
            tempting={
                "the values": "They are in W. z needs no values: it only sums up weights",
                "the features of the queries": "A query only reads: it changes neither "
                "W nor z",
            },
        ),
        Question(
            name="recall_room_of_keys",
            text="17 pairs are stored under random keys of length 1 and width 16. What "
            "is the expected squared error of reading, relative to the values?",
            truth=1.0,
            tolerance=0.05,
            because="Each of the 16 other values comes in with the weight (k_j · k)², "
            "which is 1/16 on average: (S - 1) / d with S pairs of width d.",
            tempting={0.0: "Random keys overlap, even two of them"},
        ),
        Question(
            name="exact_features",
            text="How many features does an exact phi with phi(q) · phi(k) = exp(q · k) "
            "need, for keys of width d?",
            choices=("d", "d²", "infinitely many"),
            truth="infinitely many",
            because="exp is a power series, and every power of q · k needs its own "
            "features.",
            tempting={
                "d": "Those give q · k itself, which is not exp(q · k)",
                "d²": "Those give (q · k)², the quadratic term of the series of exp",
            },
        ),
        Question(
            name="four_times_the_features",
            text="Random features estimate exp(q · k) by a mean. If you take four times "
            "as many, what is the new typical error, as a fraction of the old one?",
            truth=0.5,
            tolerance=0.1,
            because="The error of a mean falls with the square root of its number of "
            "terms.",
            tempting={
                0.25: "The error of a mean of n random terms falls as 1 / sqrt(n), not "
                "as 1 / n",
                2.0: "The error halves: as a fraction of the old one, that is 0.5",
            },
        ),
        Question(
            name="shared_maximum",
            text="To keep the features of the keys in range, you subtract a maximum "
            "from their exponents. Which maximum does not change the result of "
            "attention?",
            choices=("one for all keys", "one for each key", "one for each feature"),
            truth="one for all keys",
            because="Dividing by the sum of the weights cancels only a factor that all "
            "keys in that sum share.",
            tempting={
                "one for each key": "That changes the weight of a key relative to the "
                "others. It would be right for queries: a query's factor cancels",
                "one for each feature": "That gives features different weights: the sum "
                "over features would no longer be the same kernel",
            },
        ),
        Question(
            name="elu_memory",
            text="Eight pairs are added up under random keys of width 8. The keys "
            "themselves, scaled to length 1, give a relative squared error of 0.9; a "
            "memory that returns zeros has 1. How large is the error with the features "
            "ELU + 1 of these keys, also scaled to length 1?",
            choices=("less than 0.9", "from 0.9 to 1", "far more than 1"),
            truth="far more than 1",
            because="All these features are positive, and two keys have a cosine of "
            "about 0.7. So each of the 7 other values adds 0.7² of its squared length, "
            "which is about a half.",
            tempting={
                "less than 0.9": "The features of linear attention were chosen to be "
                "positive, not to keep keys apart",
                "from 0.9 to 1": "An empty memory has the error 1. This one is not "
                "empty: it adds 0.7 times every other value",
            },
        ),
        Question(
            name="recall_overlap",
            text="Two pairs are written under keys with k1 · k2 = 0.5, both of length "
            "1. How much of v2 do you get when you read k1 from their sum?",
            truth=0.5,
            tolerance=0.01,
            because="W k1 = v1 + v2 (k2 · k1).",
            tempting={
                0.0: "That would need orthogonal keys",
                1.0: "v2 is weighted by k2 · k1",
            },
        ),
        Question(
            name="recall_room",
            text="How many keys of width 8 can be orthogonal to each other?",
            truth=8.0,
            tolerance=0.1,
            because="As many as there are dimensions.",
            tempting={16.0: "k and -k lie on one line: they are not orthogonal"},
        ),
        Question(
            name="dpfp_plane",
            text="A key of width 2 has the four features r(x) r(y), r(y) r(-x), "
            "r(-x) r(-y) and r(-y) r(x), with r = ReLU. How many of them are above 0 "
            "for a random key?",
            truth=1.0,
            tolerance=0.01,
            because="One of x and -x is negative, and one of y and -y: the quadrant of "
            "the key decides which product is left.",
            tempting={
                2.0: "Half of the entries of r are above 0, but a product needs two",
                4.0: "r is 0 for one of x and -x, and for one of y and -y",
            },
        ),
        Question(
            name="dpfp_share",
            text="For random keys of a large width d, what fraction of the 2 d features "
            "of DPFP with nu = 1 is above 0?",
            truth=0.25,
            tolerance=0.02,
            because="Both factors of a product must be above 0: one half times one half.",
            tempting={
                0.5: "Half of r is above 0, but every feature is a product of two of "
                "its entries",
                25.0: "As a share between 0 and 1, that is 0.25",
            },
        ),
        Question(
            name="dpfp_rank",
            text="For d = 8, the paper allows nu up to 2 d - 1 = 15, which makes 240 "
            "features. What is the rank of the features of many random keys?",
            truth=112.0,
            tolerance=0.5,
            because="Only the shifts 1 to 7 add new products: 2 * 8 * 7.",
            tempting={
                240.0: "That is their number. But shift 8 is always 0, and the shifts "
                "above it repeat those below",
                128.0: "This counts shift 8, which multiplies r(k_i) by r(-k_i); one of "
                "them is always 0",
            },
        ),
        Question(
            name="stable_limit",
            text="If the same pair is written again and again, each write multiplies "
            "the error of its key by 1 - beta |phi|². From which value of beta |phi|² "
            "on does the error no longer shrink?",
            truth=2.0,
            tolerance=0.01,
            because="Beyond 2 the factor is below -1: the error changes its sign and "
            "grows.",
            tempting={
                1.0: "There the error is gone after one write. Between 1 and 2 it "
                "changes its sign each time, but still shrinks",
            },
        ),
        Question(
            name="stored_share",
            text="A key of width 64 has DPFP features that sum to 1. What fraction of v "
            "does one write with beta = 1 store in an empty memory?",
            truth=0.07,
            tolerance=0.02,
            because="Reading returns |phi|² v, and features that sum to 1 are short if "
            "there are many of them.",
            tempting={
                1.0: "That holds for features whose squares sum to 1, not the features "
                "themselves",
            },
        ),
        Question(
            name="delta_at_half",
            text="Eight orthonormal keys, overwritten at random, and beta = 1/2 for both "
            "rules. The gated rule ends with a relative squared error of 0.8. What is "
            "the error of the delta rule?",
            truth=0.33,
            tolerance=0.04,
            because="A write leaves half of the difference between the new value and "
            "what the key held: a quarter of 1 + |v_bar|². That is 1/4 after the first "
            "write of a key, and tends to 1/3. Other keys are not touched.",
            tempting={
                0.0: "Only with beta = 1: here half of the difference stays",
                0.25: "That is after the first write of a key. Later the error also "
                "contains a mixture of old values",
                0.8: "The gated rule also halves the values of all other keys with every "
                "write; the delta rule does not change them",
            },
        ),
        # --- Notebook 1 ---
        Question(
            name="recall_length",
            text="A memory holds one pair, W = v k^T, and its key has length 2. What "
            "does W k return?",
            choices=("v", "2 v", "4 v"),
            truth="4 v",
            because="W k = v (k · k), and k · k is the square of the length.",
            tempting={
                "v": "That holds for keys of length 1. Here k · k is 4",
                "2 v": "k · k is the square of the length, not the length",
            },
        ),
        Question(
            name="recall_mixture",
            text="Two pairs are stored under orthogonal keys of length 1. You read with "
            "the query k1 + k2. What comes back?",
            choices=("v1 + v2", "the mean of v1 and v2", "0, since no key is k1 + k2"),
            truth="v1 + v2",
            because="Reading is a product with a matrix: W (k1 + k2) = W k1 + W k2.",
            tempting={
                "the mean of v1 and v2": "Nothing divides by two. The query has length "
                "1.4, and fits each key as well as the key itself does",
                "0, since no key is k1 + k2": "A matrix does not look keys up. It "
                "returns every value, weighted by k · q",
            },
        ),
        Question(
            name="recall_replace",
            text="Training has made all keys orthogonal. What can a memory that only "
            "adds still not do?",
            choices=(
                "read one of two values exactly",
                "replace a value",
                "hold as many pairs as its keys have entries",
            ),
            truth="replace a value",
            because="A key that is written twice returns the sum of both values, "
            "whatever the other keys are.",
            tempting={
                "read one of two values exactly": "Orthogonal keys make this possible: "
                "the other value gets the weight 0",
                "hold as many pairs as its keys have entries": "That many keys can be "
                "orthogonal, and all of them are read exactly",
            },
        ),
        Question(
            name="break_even",
            text="A head has keys and values of width 64. After how many tokens are its "
            "lists of keys and values as large as the matrix W?",
            truth=32.0,
            tolerance=0.5,
            because="W has 64 times 64 numbers, and each token adds 2 times 64 to the "
            "lists.",
            tempting={
                64.0: "That would be right if a token added one vector. It adds two, a "
                "key and a value",
                4096.0: "That is the size of W. A token adds 128 numbers, not one",
            },
        ),
        Question(
            name="mean_square",
            text="Two random keys of length 1 have the width d = 16. What is the mean "
            "square of k1 · k2?",
            truth=0.0625,
            tolerance=0.006,
            because="It is 1/d.",
            tempting={
                0.0: "That is the mean of k1 · k2 itself, which is as often negative as "
                "positive. Its square is never negative",
                0.25: "1/sqrt(d) is the typical size of k1 · k2. You are asked for the "
                "square",
                1.0: "That is k1 · k1: a key matches itself",
            },
        ),
        Question(
            name="same_values",
            text="Now all pairs store the same value instead of random values. The keys "
            "are random as before. What happens to the relative error of reading?",
            choices=("it shrinks", "it stays the same", "it grows"),
            truth="it stays the same",
            because="The weights c of the other pairs are as often negative as positive, "
            "so the cross terms vanish, whatever the values are.",
            tempting={
                "it shrinks": "You might expect to read the one value that is there. But "
                "its copies come in with random weights, which add up to a random "
                "number, not to 1",
                "it grows": "Equal values would add up if their weights had the same "
                "sign. The weights of random keys do not",
            },
        ),
        Question(
            name="softmax_replaced",
            text="Softmax attention reads a key that is in its list twice, with an old "
            "and a new value. What does it return?",
            choices=("the new value", "the old value", "the mean of both"),
            truth="the mean of both",
            because="Equal keys get equal weights, and the weights sum to one.",
            tempting={
                "the new value": "That would need a weight that depends on the "
                "position. The keys are equal, so their weights are equal, too",
                "the old value": "It has no advantage: equal keys get equal weights",
            },
        ),
        # --- Notebook 3 ---
        Question(
            name="recall_random",
            text="For which keys and queries do 64 random features give the worst "
            "estimate of exp(q · k)?",
            choices=("short ones", "long ones", "their length does not matter"),
            truth="long ones",
            because="For long ones, a few rare directions along q + k make up most of "
            "the mean.",
            tempting={
                "short ones": "For these all directions give nearly the same result, so "
                "the mean of a few is already right",
                "their length does not matter": "The exponent of a feature grows with "
                "the length, and with it the spread of the features",
            },
        ),
        # --- Notebook 4 ---
        Question(
            name="recall_scale",
            text="Linear attention divides by z · phi(q). The features of all keys are "
            "multiplied by 2. What happens to the result?",
            choices=("nothing", "it doubles", "it becomes 4 times as large"),
            truth="nothing",
            because="W and z both double, so their quotient stays the same.",
            tempting={
                "it doubles": "W phi(q) doubles. But z adds up the same features, so "
                "the denominator doubles, too",
                "it becomes 4 times as large": "Each feature of a key is once in W and "
                "once in z, and the two are divided",
            },
        ),
        Question(
            name="recall_dpfp_width",
            text="How many features does DPFP with nu = 2 make from a key of width 16?",
            truth=64.0,
            tolerance=0.5,
            because="k and -k have 32 entries together, and each shift multiplies all "
            "of them: 2 d nu.",
            tempting={
                32.0: "That is for one shift; nu = 2 has two",
                256.0: "That would be all products of two entries. DPFP takes only "
                "those at a distance of 1 or 2",
            },
        ),
        Question(
            name="half_thrice",
            text="A key of length 1 holds a value. The delta rule with beta = 1/2 "
            "writes a new value under it, three times. What fraction of the old value "
            "is left?",
            truth=0.125,
            tolerance=0.01,
            because="Each write halves what is left of the old value: 1/2 times 1/2 "
            "times 1/2.",
            tempting={
                0.0: "Two writes of one half each do not replace the whole: the second "
                "replaces half of the half that is left",
                -0.5: "A write takes half of what is left, not half of what was there "
                "at first",
                0.5: "That is after the first write",
            },
        ),
        Question(
            name="one_gradient_step",
            text="Which rule is one step of gradient descent on E(W) = ½ |W k - v|² "
            "with learning rate beta?",
            choices=("the sum rule", "the delta rule", "none of these"),
            truth="the delta rule",
            because="The gradient is (W k - v) ⊗ k, and Eq. 24 adds minus beta times "
            "this gradient.",
            tempting={
                "the sum rule": "It adds beta v ⊗ k, which is a gradient step only "
                "where W k is 0, as in an empty memory. Where W already returns v, the "
                "gradient is 0, but the sum adds v once more",
                "none of these": "The derivative by entry (i, j) of W is the error of "
                "value i times k_j: an outer product, as in Eq. 24",
            },
        ),
        Question(
            name="gated_eight",
            text="A pair is stored. Then the gated rule with beta = 1/2 writes eight "
            "other pairs, all under a key that is orthogonal to the first. What "
            "fraction of the first value is left?",
            truth=1 / 256,
            tolerance=0.0005,
            because="Each write multiplies all of W by 1/2: (1/2)^8 = 1/256 = 0.0039.",
            tempting={
                1.0: "That would be right for the delta rule, which only changes the "
                "value of the key that it writes",
                0.5: "That is after the first of the eight writes",
                0.0: "Nearly, but each factor of 1/2 leaves something",
            },
        ),
        Question(
            name="delta_overlap",
            text="16 pairs are written once each under random keys of width 16 and "
            "length 1. The sum has an error of 0.94. What is the error of the delta "
            "rule with beta = 1?",
            truth=0.59,
            tolerance=0.1,
            because="Each write makes its own pair perfect and disturbs all earlier "
            "pairs, which adds about a tenth to their errors, up to 15 times.",
            tempting={
                0.0: "Only the pair written last is perfect: the keys overlap, so later "
                "writes change what earlier keys return",
                0.94: "The delta rule suffers from the overlap, too, but it writes only "
                "the difference to what the key already returns",
            },
        ),
        # --- Notebook 5 ---
        Question(
            name="recall_no_features",
            text="A key of width 4 is (0, 2, 0, 0). How many of its features are above "
            "0 in DPFP with nu = 3?",
            truth=0.0,
            tolerance=0.01,
            because="A feature multiplies two entries of r([k; -k]), and only one of "
            "them is above 0. So the sum of the features is 0, too.",
            tempting={
                1.0: "One entry of r([k; -k]) is above 0, but every feature needs two",
                3.0: "Each of the three shifts multiplies that entry by another one, "
                "which is 0",
            },
        ),
        Question(
            name="recall_other_key",
            text="The delta rule with beta = 1/2 writes a pair under k. What does a key "
            "that is orthogonal to k return afterwards?",
            choices=("what it returned before", "half of that", "0"),
            truth="what it returned before",
            because="The write changes the reading of a query q by a multiple of k · q, "
            "and here k · q is 0.",
            tempting={
                "half of that": "That is the gated rule, which fades everything",
                "0": "That is the gated rule with beta = 1. The delta rule only changes "
                "keys that overlap with k",
            },
        ),
        Question(
            name="recall_long_key",
            text="A pair is added to an empty memory, under a key of length 2. You read "
            "with the same key. How many times v do you get?",
            truth=4.0,
            tolerance=0.01,
            because="W k = v (k · k), and k · k = |k|² = 4.",
            tempting={
                2.0: "The length counts twice: the key is in the write and in the read",
                1.0: "That holds for keys of length 1",
            },
        ),
        Question(
            name="raw_features",
            text="64 pairs with values of size 1 are written once each, with beta = 1, "
            "under DPFP features as they are. Their |phi|² is 8 on average. How large is "
            "the largest entry of W at the end?",
            choices=("about 2", "about 100", "more than 10,000"),
            truth="more than 10,000",
            because="Most keys have beta |phi|² above 2. Such a write enlarges whatever "
            "the memory holds along its key, and later keys overlap with it.",
            tempting={
                "about 2": "That is right if beta |phi|² stays at 1: then the delta rule "
                "writes the missing difference, which is about 1",
                "about 100": "64 pairs would add up to less than that under the sum "
                "rule. But here every overshoot causes a larger one",
            },
        ),
        Question(
            name="denominator",
            text="The delta rule with the normaliser of Eqs. 26-28 and beta = 1 writes "
            "v1 under a key, then v2 under the same key. What fraction of v2 does "
            "reading return?",
            truth=0.5,
            tolerance=0.01,
            because="W holds v2, as it should, but z has counted the key twice, so "
            "reading returns v2 / 2.",
            tempting={
                1.0: "W holds v2, but the reading is divided by z · phi, which is 2 "
                "after two writes",
            },
        ),
        Question(
            name="balance_of_length",
            text="A key has the four features 0.5, 0.5, 0.5, 0.5, so its length is 1. "
            "For each unit of weight that enters a column, how much leaves it?",
            truth=2.0,
            tolerance=0.01,
            because="k_i enters, and k_i times the sum of all features leaves: the sum "
            "is 2.",
            tempting={
                1.0: "That would be right if the features summed to 1; here their "
                "squares do",
                0.5: "That is the weight k_i that enters. The weight that leaves is k_i "
                "times the sum of all four",
            },
        ),
        # --- Notebook 6 ---
        Question(
            name="recall_shifts",
            text="How many features does DPFP with nu = 3 make from a key of width 8?",
            truth=48.0,
            tolerance=0.5,
            because="2 d for each shift: 2 * 8 * 3.",
            tempting={
                16.0: "That is nu = 1: every further shift adds 2 d features",
                8.0: "That is the width of the key",
            },
        ),
        Question(
            name="recall_thrice",
            text="Linear attention with its z has written one key three times, with "
            "v1, v2 and v3. The features of all other keys are orthogonal to it. What "
            "does reading it return?",
            choices=("v3", "v1 + v2 + v3", "the mean of v1, v2 and v3"),
            truth="the mean of v1, v2 and v3",
            because="W phi is the sum of the three, times |phi|², and z . phi is "
            "3 |phi|².",
            tempting={
                "v3": "A sum removes nothing, so the older values are still there",
                "v1 + v2 + v3": "That is W phi alone. The normaliser divides by the sum "
                "of the weights",
            },
        ),
        Question(
            name="recall_half",
            text="A key of length 1 holds v1. The delta rule writes v2 under it, with "
            "beta = 1/2. What does reading it return?",
            choices=("v2", "v1 + v2 / 2", "(v1 + v2) / 2"),
            truth="(v1 + v2) / 2",
            because="It holds (1 - beta) of the old value and beta of the new one.",
            tempting={
                "v2": "That would be beta = 1",
                "v1 + v2 / 2": "The delta rule also removes: beta times the old value",
            },
        ),
        Question(
            name="best_guess",
            text="You know nothing about the query, but must answer. The right answer "
            "is one of 24 one-hot values, and the loss is half of the squared error. "
            "Which answer has the smallest loss on average?",
            choices=("zeros", "one of the values at random", "the mean of all values"),
            truth="the mean of all values",
            because="The mean has the smallest loss: (1 - 1/24) / 2. Zeros cost 1/2.",
            tempting={
                "zeros": "They cost exactly 1/2. The mean of all values is a little "
                "better, since it always contains 1/24 of the right value",
                "one of the values at random": "It is right once in 24 times, but a "
                "wrong value costs 1, twice as much as no value at all",
            },
        ),
        Question(
            name="forget_or_share",
            text="There are 24 pairs and 16 orthogonal features. Plan A stores 16 pairs exactly and "
            "forgets 8. Plan B gives 8 features to two keys each, so that these 16 keys "
            "return the mean of two values; the other 8 are exact. Which plan has the "
            "smaller loss?",
            choices=("plan A: forget 8", "plan B: share 8 features", "both the same"),
            truth="both the same",
            because="8 forgotten pairs cost 1/2 each, and 16 keys that share cost 1/4 "
            "each.",
            tempting={
                "plan A: forget 8": "Fewer keys are wrong, but a forgotten value costs "
                "1/2, and a mean of two values only 1/4",
                "plan B: share 8 features": "Each wrong key costs only 1/4 there, but "
                "there are 16 of them",
            },
        ),
        Question(
            name="loss_beyond",
            text="Linear attention with 16 features (ELU + 1, keys of width 16) is "
            "trained to store 24 pairs. What loss will it reach?",
            truth=1 / 6,
            tolerance=0.015,
            because="Training finds keys that reach the bound, (1 - 16/24) / 2.",
            tempting={
                0.0: "24 directions do not fit into 16",
                1 / 3: "A third of the directions is lost, but the loss has a half in "
                "front of the square",
                0.5: "That is a memory that returns zeros: this one keeps 16 directions",
            },
        ),
        Question(
            name="sum_of_returns",
            text="With eight keys and 16 pairs, every key comes twice on average, each "
            "time with a new value. Linear attention has 64 features, which is more than "
            "enough room. After training, what is its loss for the last values?",
            truth=0.185,
            tolerance=0.04,
            because="It returns the mean of all values that the key had, but only the "
            "last of them is right.",
            tempting={
                0.0: "There is room for the keys. But a sum cannot distinguish the last "
                "value of a key from earlier ones",
                0.5: "That is the loss of zeros. Many keys came only once, and the "
                "others return a mean that contains the right value",
                0.25: "That is the loss of the mean of two values. Some keys came only "
                "once, and have no loss",
            },
        ),
        Question(
            name="without_gate",
            text="The delta rule learns this task. Now beta is fixed to 1, and cannot be "
            "trained. What happens?",
            choices=("it learns the task, too", "it keeps a mixture", "it diverges"),
            truth="it learns the task, too",
            because="Every new value has to replace the old one completely, which is "
            "beta = 1.",
            tempting={
                "it keeps a mixture": "A mixture is left when too little is removed: at "
                "beta = 1 the old value goes completely, if the features have length 1",
                "it diverges": "The features sum to 1, so their length is at most 1, and "
                "beta |phi|² stays below 2",
            },
        ),
        # --- Notebook 7 ---
        Question(
            name="recall_beta_zero",
            text="The delta rule writes a pair with beta = 0. What happens to W?",
            choices=(
                "it stays as it is",
                "it becomes 0",
                "what the key holds is removed",
            ),
            truth="it stays as it is",
            because="The whole change, beta (v - W k) k^T, is multiplied by beta.",
            tempting={
                "it becomes 0": "If nothing is written, nothing is removed: beta "
                "multiplies the whole change",
                "what the key holds is removed": "That would be v = 0 with beta = 1",
            },
        ),
        Question(
            name="recall_dpfp_state",
            text="A head has keys and values of width 8, and DPFP features with nu = 1. "
            "How many numbers does its W hold?",
            truth=128.0,
            tolerance=0.5,
            because="W is value times features, 8 times 2 d nu = 16.",
            tempting={
                64.0: "W has a column for each feature, and there are 16 of them",
                256.0: "Values have no features: their width stays 8",
            },
        ),
        Question(
            name="recall_order_of_a_sum",
            text="The same pairs are written in a different order into a memory that "
            "adds them up. How does its reading change?",
            choices=(
                "not at all",
                "the last pair counts more",
                "the first pair counts more",
            ),
            truth="not at all",
            because="A sum does not depend on the order of its terms. The delta rule does.",
            tempting={
                "the last pair counts more": "That holds for the delta rule, which "
                "removes what was there before",
                "the first pair counts more": "Nothing protects it",
            },
        ),
        Question(
            name="lm_memory_off",
            text="The write strengths of all layers are set to 0 in the trained model. "
            "Where does its loss go?",
            choices=(
                "it hardly changes",
                "to that of the pairs",
                "above that of the pairs",
            ),
            truth="above that of the pairs",
            because="The remaining parts were trained together with the memory, and "
            "rely on it.",
            tempting={
                "to that of the pairs": "Like the pair counts, it sees the last character. "
                "But its other parts were never trained to work with that alone",
                "it hardly changes": "Then the memory would not be used, and a single "
                "character would be enough to beat the pair counts",
            },
        ),
        Question(
            name="lm_which_layer",
            text="If one of the six layers loses its memory, which one increases the "
            "loss most?",
            choices=("the first", "the last", "none more than others"),
            truth="the first",
            because="It is the first layer that can see other characters, and the "
            "layers above build on its results.",
            tempting={
                "the last": "It is closest to the output, but without it x still "
                "contains the results of five layers",
                "none more than others": "The layers are equal before training, but "
                "their inputs are not: only the first one sees single characters",
            },
        ),
        Question(
            name="lm_trained_without",
            text="The same model is trained for as long, but without memory from the "
            "start. Where does its loss end?",
            choices=(
                "about where the model with memory ended",
                "about that of the pairs",
                "about where the removed memory left it",
            ),
            truth="about that of the pairs",
            because="Every layer sees one character. So at best the model is as good as "
            "the pair counts.",
            tempting={
                "about where the model with memory ended": "No part of it can see an "
                "earlier character, however long it is trained",
                "about where the removed memory left it": "In that model, the other "
                "parts were trained with a memory. Here they learn to work without one",
            },
        ),
        Question(
            name="lm_beta_mean",
            text="Each head writes every character with its mean strength, instead of "
            "one that it chooses. How much of the benefit of the memory does this model "
            "lose?",
            choices=("almost nothing", "about half", "all of it"),
            truth="about half",
            because="The model has learned which characters to write strongly, and it "
            "relies on this.",
            tempting={
                "almost nothing": "That would be right if only the size of the strengths "
                "mattered, and not which character gets which strength",
                "all of it": "The memory still writes and corrects; it only loses the "
                "choice of strengths",
            },
        ),
        Question(
            name="lm_reach",
            text="How many of the last characters are enough to predict the next one "
            "nearly as well as with all 32?",
            choices=("one or two", "four to ten", "almost all 32"),
            truth="four to ten",
            because="After so little training, the model knows words and their endings, "
            "but uses no wider context.",
            tempting={
                "one or two": "The pair counts use one, and the model is clearly better",
                "almost all 32": "The memory has room for more, but the model does not "
                "use it",
            },
        ),
        Question(
            name="rule_or_features",
            text="The delta rule with DPFP ends lower than the sum with ELU + 1. What "
            "makes the difference?",
            choices=("the rule", "the features", "only both together"),
            truth="the rule",
            because="With the same features the delta rule ends lower, and with the same "
            "rule the features change little.",
            tempting={
                "the features": "The sum ends at nearly the same loss with all three "
                "feature maps",
                "only both together": "The delta rule is better with ELU + 1, too",
            },
        ),
        # --- Notebook 8 ---
        Question(
            name="recall_bound",
            text="Linear attention has 16 features, and trained keys. It stores 32 "
            "pairs with one-hot values. What is the smallest loss (half of the squared "
            "error) that it can reach?",
            truth=0.25,
            tolerance=0.01,
            because="16 of the 32 directions are lost: (1 - 16/32) / 2.",
            tempting={
                0.0: "32 values do not fit into 16 directions",
                0.5: "That is a memory that returns zeros. This one keeps 16 of 32 "
                "directions",
            },
        ),
        Question(
            name="recall_increment",
            text="The delta rule adds an outer product u k^T to W. What is u?",
            choices=("beta v", "v - W k", "beta (v - W k)"),
            truth="beta (v - W k)",
            because="It is the difference between the new value and what the key "
            "holds, times the write strength.",
            tempting={
                "beta v": "That is a sum rule with strengths: it removes nothing",
                "v - W k": "That is the whole difference; beta says how much of it is "
                "written",
            },
        ),
        Question(
            name="recall_generation",
            text="A transformer with fast weights generates its 1000th token. What does "
            "it need from the 999 tokens before?",
            choices=(
                "their keys and values",
                "one state per head",
                "one state per token and head",
            ),
            truth="one state per head",
            because="The state after token 999 holds everything that the layer knows "
            "about them.",
            tempting={
                "their keys and values": "That is the cache of softmax attention",
                "one state per token and head": "Only the most recent state is read and "
                "changed; the others are needed for training, as you see below",
            },
        ),
        Question(
            name="loop_keeps",
            text="One head of the delta rule, with keys and values of width 64, is "
            "computed in a loop. How many times the size of the inputs q, k, v and beta "
            "does autograd keep for the backward pass?",
            truth=22.6,
            tolerance=2.0,
            because="W of a step has 64 x 64 numbers, and the inputs of a step have 3 x "
            "64 + 1.",
            tempting={
                1.0: "The inputs would be enough if W were recomputed. But autograd "
                "keeps every W",
                64.0: "W is 64 times as large as one vector, but there are three "
                "vectors per step",
            },
        ),
        Question(
            name="needs_w",
            text="The sum rule writes v_i under k_i, and q_i reads W_i. Which gradient "
            "needs W_i?",
            choices=("that of q_i", "that of k_i", "that of v_i", "all three"),
            truth="that of q_i",
            because="W_i is a factor only of the product W_i q_i. The write adds v_i "
            "k_i^T, whatever W holds.",
            tempting={
                "all three": "Key and value are multiplied with each other, so their "
                "gradients need the gradient of W, but not W itself",
                "that of k_i": "In the delta rule it does, since the key also reads "
                "there. Here it only writes",
                "that of v_i": "The value is written under k_i, so its gradient is that "
                "of W, times k_i",
            },
        ),
        Question(
            name="undo_2000",
            text="In float32, 2000 steps of the delta rule are undone, from the last W "
            "to the first. Which way still gives the right W?",
            choices=(
                "subtract the increments, which were kept",
                "solve each update for W before it",
                "both",
                "neither",
            ),
            truth="subtract the increments, which were kept",
            because="A subtraction only adds a rounding error. Solving divides by 1 - "
            "beta |k|² at every step, which multiplies all past errors.",
            tempting={
                "solve each update for W before it": "That divides by 1 - beta |k|² at "
                "every step, and errors grow with every division",
                "both": "Both are right in exact arithmetic. But 1 - beta |k|² is below "
                "1, so dividing by it makes errors grow",
                "neither": "Rounding errors of subtractions do not grow by themselves",
            },
        ),
        Question(
            name="best_segment",
            text="The state before every stretch of c steps is kept. The backward pass "
            "recomputes the c states of one stretch, and then continues with the "
            "stretch before. For 1024 steps, which c needs the least memory?",
            truth=32.0,
            tolerance=0.5,
            because="1024 / c states are kept and c are recomputed. The sum is smallest "
            "where both are equal, at the square root of 1024.",
            tempting={
                1.0: "Then every state is kept, as in the plain loop",
                1024.0: "Then only one state is kept, but the backward pass recomputes "
                "all 1024 at once",
            },
        ),
    )
}
"""Every question by name."""
