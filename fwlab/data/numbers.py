"""Write numbers as English and German words."""

#: Words for 0 to 19, then for 20, 30 and so on.
_ENGLISH = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen "
    "fourteen fifteen sixteen seventeen eighteen nineteen "
    "twenty thirty forty fifty sixty seventy eighty ninety"
)
_GERMAN = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn "
    "vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn "
    "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig"
)


def number_words(number: int, language: str = "english") -> str:
    """Return a number in words, in English or in German.

    German says the ones before the tens, and writes one long word: 421
    is "four hundred twenty-one" and "vierhunderteinundzwanzig".

        >>> print(number_words(421), "->", number_words(421, "german"))
        four hundred twenty-one -> vierhunderteinundzwanzig

    - `number`: from 0 to 999,999.
    - `language`: "english" or "german".
    - Returns the words.
    - Raises `ValueError` for other numbers and languages.
    """
    if not 0 <= number < 1_000_000:
        raise ValueError(f"expected number to be from 0 to 999,999, got {number}")
    if language == "english":
        return _english(number)
    if language == "german":
        # German has "ein" before another word, and "eins" at the end.
        return _german(number) + ("s" if number % 100 == 1 else "")
    raise ValueError(f"expected language to be 'english' or 'german', got {language!r}")


def _english(number: int) -> str:
    for unit, word in ((1000, "thousand"), (100, "hundred")):
        count, rest = divmod(number, unit)
        if count:
            words = f"{_english(count)} {word}"
            return f"{words} {_english(rest)}" if rest else words
    tens, ones = _below_100(number, _ENGLISH)
    return f"{tens}-{ones}" if tens and ones else tens or ones


def _german(number: int) -> str:
    for unit, word in ((1000, "tausend"), (100, "hundert")):
        count, rest = divmod(number, unit)
        if count:
            return _german(count) + word + (_german(rest) if rest else "")
    tens, ones = _below_100(number, _GERMAN)
    return f"{ones}und{tens}" if tens and ones else tens or ones


def _below_100(number: int, words: str) -> tuple[str, str]:
    """Return the words for the tens and the ones of a number below 100, or ""."""
    known = words.split()
    if number < 20:
        return "", known[number]
    tens, ones = divmod(number, 10)
    return known[18 + tens], known[ones] if ones else ""
