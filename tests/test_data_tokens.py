"""Test vocabularies of words, documents, token files, and packed rows."""

import hashlib
import random

import pytest
import torch
from alike import refuses

from fwlab.data import (
    Characters,
    CorpusError,
    Splits,
    Text,
    Words,
    packed,
    packed_rows,
    token_file,
)

#: Articles in the format of WikiText; the third has a section and a formula.
ARTICLES = [
    " \n = A long title = \n \n one two \n \n three \n \n",
    " = B = \n \n",
    " = C = \n \n = = Part = = \n \n x \n = 1 + 2 = \n y \n é \n",
]


def test_words():
    words = Words(["the", "<eos>", "<unk>", "cat"])
    assert len(words) == 4
    tokens = words.encode("the  cat\n\n the dog")
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [0, 3, 1, 1, 0, 2]
    assert words.decode(tokens) == "the cat\n\nthe <unk>"
    assert words.encode(" the cat \n").tolist() == [0, 3, 1]  # A space is not a word.
    assert words.encode("").shape == (0,)
    assert words.decode(words.encode("")) == ""
    assert words.encode(words.start).tolist() == [1]
    strict = Words(["the", "<eos>"])
    refuses(lambda: strict.encode("the dog\n"), "got 'dog'", ValueError)
    refuses(lambda: Words(["<eos>", "the", "<unk>", "the"]), "got 'the' twice")
    refuses(lambda: Words(["the"]), "to have '<eos>'", ValueError)


def test_most_frequent_words_come_first():
    text = "c b b a a <unk> d\n<unk> d d\n"
    for pieces in ([text], text.splitlines(keepends=True), iter([text])):
        vocabulary = Words.of(pieces).vocabulary
        assert vocabulary == ["<eos>", "<unk>", "d", "b", "a", "c"]
    assert Words.of([text], minimum=2).vocabulary == ["<eos>", "<unk>", "d", "b", "a"]
    assert Words.of([]).vocabulary == ["<eos>", "<unk>"]
    with pytest.raises(ValueError, match="minimum to be at least 1, got 0"):
        Words.of([text], minimum=0)


@pytest.mark.parametrize("seed", range(100))
def test_words_survive(seed):
    draw = random.Random(seed)
    text = "".join(draw.choices("ab \n\t\r\x85é", k=draw.randrange(31)))
    words = Words.of([text])
    tokens = words.encode(text)
    assert (tokens != 1).all()  # No token is unknown.
    assert words.encode(words.decode(tokens)).equal(tokens)
    assert tokens.eq(0).sum() == text.count("\n")


TEXT = Text.of_articles("".join(ARTICLES))


@pytest.fixture(params=[1, 7, 1 << 20], ids="{} characters".format)
def size(request, monkeypatch):
    """Set the minimum number of characters in a piece of text."""
    monkeypatch.setattr("fwlab.data.texts.PIECE", request.param)


def test_documents_and_pieces(size):
    whole = "".join(ARTICLES)
    assert list(TEXT.documents) == ARTICLES
    for text in (TEXT, Text((whole,))):
        pieces = list(text.pieces())
        assert "".join(pieces) == whole
        assert all(piece.endswith("\n") for piece in pieces)
        assert text.sha256() == hashlib.sha256(whole.encode()).hexdigest()
    assert "".join(Text(("no end", "", "a\nb")).pieces()) == "no enda\nb"


@pytest.mark.parametrize("before", [0, 1, 5, 17])
def test_cut(before):
    """`Splits.of` can cut a text anywhere, even within a line."""
    documents = ("é" * before, *ARTICLES)
    whole = "".join(documents)
    cut = int(0.9 * len(whole))
    both = Splits.of(Text(documents))
    assert "".join(both.train.documents) == whole[:cut]
    assert "".join(both.valid.documents) == whole[cut:]
    assert both.train.documents[-2:-1] == (ARTICLES[1],)
    assert both.sha256() == hashlib.sha256(whole.encode()).hexdigest()


def words_of(text):
    return Words.of(text.pieces())


def same(made, tokens, borders):
    assert made.tokens.equal(tokens) and made.borders.equal(borders)


def test_token_file(size, tmp_path, monkeypatch):
    words = words_of(TEXT)
    path = tmp_path / "made" / "words.tokens"
    tokens, borders = token_file(TEXT, words, path)
    whole = words.encode("".join(ARTICLES))
    assert tokens.long().equal(whole)
    lengths = [len(words.encode(article)) for article in ARTICLES]
    assert borders.diff().tolist() == lengths
    assert borders[0] == 0
    index = torch.tensor([0, 5])[:, None] + torch.arange(4)
    assert tokens[index].long().equal(whole[index])
    assert [p.name for p in path.parent.iterdir()] == ["words.tokens"]
    kept = token_file(TEXT, words, None)
    same(kept, tokens, borders)
    # The next call reads the file instead of encoding the text.
    monkeypatch.setattr(Words, "encode", None)
    before = path.read_bytes()
    again = token_file(TEXT, words, str(path))
    same(again, tokens, borders)
    again.tokens[0] += 1
    again.borders[0] += 1
    assert path.read_bytes() == before
    assert not again.tokens.equal(token_file(TEXT, words, path).tokens)


@pytest.mark.parametrize(("entries", "dtype"), [(32768, "int16"), (32769, "int32")])
def test_every_token_fits(tmp_path, entries, dtype):
    words = Words(["<eos>", *map(str, range(entries - 1))])
    text = Text((f"0 1\n{entries - 2}\n",))
    for path in (tmp_path / "tokens", None):
        tokens, borders = token_file(text, words, path)
        assert tokens.dtype == getattr(torch, dtype)
        assert tokens.tolist() == [1, 2, 0, entries - 1, 0]
        assert borders.tolist() == [0, 5]
        assert borders.dtype == torch.int64


class Backwards(Words):
    def encode(self, text):
        return 1 - super().encode(text)


def test_other_files_are_never_taken(tmp_path):
    """A token file for another text or vocabulary is never used."""
    path = tmp_path / "tokens"
    a, b = "a b\n", "b a\n"
    ab = Words(["<eos>", "a", "b"])
    for text, vocabulary, expected in [
        (Text((a,)), ab, ([1, 2, 0], [0, 3])),
        (Text((b,)), ab, ([2, 1, 0], [0, 3])),  # text
        (Text((b,)), Words(["a", "<eos>", "b"]), ([2, 0, 1], [0, 3])),  # order
        (Text((b + a,)), ab, ([2, 1, 0, 1, 2, 0], [0, 6])),
        (Text((b, a)), ab, ([2, 1, 0, 1, 2, 0], [0, 3, 6])),  # documents
        (Text(("a",)), Words(["<eos>", "a"]), ([1], [0, 1])),
        (Text(("a",)), Backwards(["<eos>", "a"]), ([0], [0, 1])),  # kind
        (Text(("a",)), Words(["<eos>", "a"]), ([1], [0, 1])),
        (Text(("a",)), Characters("a"), ([0], [0, 1])),
    ]:
        for _ in range(2):
            made = token_file(text, vocabulary, path)
            assert (made.tokens.tolist(), made.borders.tolist()) == expected


def test_truncated_file(tmp_path):
    path, text = tmp_path / "tokens", Text(("a b\n", "a"))
    words = words_of(text)
    tokens, borders = token_file(text, words, path)
    whole = path.read_bytes()
    for wrong in (b"", whole[:20], whole[:-1], whole + b"\0", b"\0" + whole[1:]):
        path.unlink()  # A mapped file remains readable after unlinking.
        path.write_bytes(wrong)
        made = token_file(text, words, path)
        same(made, tokens, borders)
        assert path.read_bytes() == whole


def test_nothing_is_left_behind(tmp_path):
    path = tmp_path / "tokens"
    with pytest.raises(ValueError, match="got 'b'"):
        token_file(Text(("a\n", "b\n")), Words(["<eos>", "a"]), path)
    for where in (path, None):
        with pytest.raises(CorpusError, match="at least one token"):
            token_file(Text(("", " ")), Words(["<eos>", "a"]), where)
    assert not list(tmp_path.iterdir())
    for wrong in (tmp_path, tmp_path / "file" / "tokens"):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(CorpusError, match=r"cannot (read|write) the token file"):
            token_file(Text(("a",)), Words(["<eos>", "a"]), wrong)


def test_empty_documents_have_no_borders():
    text = Text(("", "a b", " ", "a", ""))
    assert token_file(text, words_of(text), None).borders.tolist() == [0, 2, 3]


def documents(sizes):
    """Return tokens with values 100 * document + index, and the document borders."""
    tokens = [100 * d + i for d, size in enumerate(sizes) for i in range(size)]
    return torch.tensor(tokens, dtype=torch.int16), torch.tensor([0, *sizes]).cumsum(0)


@pytest.mark.parametrize("case", range(100))
def test_every_token_once_per_epoch(case):
    draw = random.Random(case)
    sizes = [draw.randint(1, 9) for _ in range(draw.randint(1, 8))]
    length, seed = draw.randint(1, 12), draw.choice([None, 0, 1, 2])
    tokens, borders = documents(sizes)
    rows, count = packed_rows(borders, length), len(tokens)
    for epoch in range(2):
        batches = [
            packed(tokens, borders, length, row, seed)
            for row in range(epoch * rows, (epoch + 1) * rows)
        ]
        assert {each.inputs.shape for each in batches} == {(1, length)}
        inputs, targets = (torch.cat([x[i][0] for x in batches]) for i in (0, 1))
        assert (inputs[count:] == 0).all() and (targets[count:] == -100).all()
        inputs, targets = inputs[:count], targets[:count]
        assert inputs.sort().values.equal(tokens.long())
        ends = torch.tensor([100 * d + size - 1 for d, size in enumerate(sizes)])
        last = torch.isin(inputs, ends)
        assert targets.equal((inputs + 1).masked_fill(last, -100))
        # Borders are at the starts of documents, of rows and of padding.
        step = torch.arange(rows * length)
        begins = (step % length == 0) | (step == count)
        begins[:count] |= inputs % 100 == 0
        cu = [each.cu_seqlens + row * length for row, each in enumerate(batches)]
        assert torch.cat([x[:-1] for x in cu]).equal(begins.nonzero()[:, 0])
        assert all(each.cu_seqlens[-1] == length for each in batches)


def test_order_of_documents():
    """The order of documents depends only on the seed and the epoch."""
    tokens, borders = documents([2] * 30)
    rows = packed_rows(borders, 60)
    assert rows == 1

    def order(row, seed):
        return packed(tokens, borders, 60, row, seed).inputs.tolist()

    assert order(0, None) == order(1, None) == [tokens.tolist()]
    assert order(0, 1) == order(0, 1)
    different = [order(row, seed) for row in (0, 1) for seed in (None, 1, 2)]
    assert len({str(each) for each in different}) == 5


def test_packed_refuses():
    tokens, borders = documents([3, 4])
    for changes, said in (
        *(
            ((tokens, wrong, 4, 0), "borders from 0 to 7")
            for wrong in (borders[:-1], borders + 1, borders[1:])
        ),
        ((tokens, borders, 4, -1), "row to be at least 0, got -1"),
        ((tokens, borders, 0, 0), "length to be at least 1, got 0"),
        ((tokens[:0], borders[:1], 4, 0), "at least 1 token"),
    ):
        refuses(lambda changes=changes: packed(*changes), said, ValueError)
