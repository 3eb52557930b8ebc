"""Prints data previews: with colors and underlines on a terminal, otherwise with marks and 80 columns."""

import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.text import Text

from rlhf_cli.data.preview import Bin, Piece, PreviewPart, ShownExample, length_bins, quantile
from rlhf_cli.runs.data_preview import Preview
from rlhf_cli.tracking.terminal.pictures import draws_pictures, print_picture

_PLAIN_WIDTH = 80
"""Line width without a terminal."""
_MAX_BAR = 40
_MAX_FILES = 4
"""Maximum number of files to list per source."""
MARKS = "[[", "]]"
"""Marks around trained tokens without colors."""
_TRAINED, LEFT_OUT, _SPECIAL, FAINT, _HEADING = "green underline", "yellow", "bold", "dim", "bold cyan"
_KEPT_CONTROLS = "\n\t"


def show(
    previews: Sequence[Preview], console: Console, *, command: str, environment: Mapping[str, str] = os.environ
) -> None:
    """Print sources, examples, lengths, and counts of truncated or dropped rows.

    `environment` contains the terminal's variables, which select the image protocol.
    """
    for preview in previews:
        page = Page(console, preview.special_tokens, environment)
        page.heading(f"{preview.title} as rlhf {command} reads {'it' if preview.title != 'Prompts' else 'them'}")
        page.sources(preview)
        page.examples(preview)
        page.lengths(preview)
        page.counts(preview)


class Page:
    """Prints lines wrapped to the terminal width."""

    def __init__(self, console: Console, special_tokens: Sequence[str], environment: Mapping[str, str]) -> None:
        self._console, self._environment = console, environment
        self._is_plain = not console.is_terminal
        self._width = _PLAIN_WIDTH if self._is_plain else console.width
        self._special_tokens = list(special_tokens)

    def heading(self, text: str) -> None:
        self.line(Text(text, _HEADING))

    def line(self, text: Text | str = "", *, indent: int = 0, hanging: int = 0) -> None:
        """Print wrapped text. Lines are indented by `indent`, and after the first also by `hanging`."""
        text = Text(text) if isinstance(text, str) else text
        # A narrow terminal must not reduce the width to zero or less.
        width = max(20, self._width - indent - hanging)
        for number, line in enumerate(text.wrap(self._console, width, overflow="fold", tab_size=8)):
            # Trailing spaces would wrap to an empty line in a terminal of exactly this width.
            line.rstrip()
            shift = " " * (indent + (hanging if number else 0)) if line.plain else ""
            self._console.print(Text(shift).append_text(line), soft_wrap=True, highlight=False)

    def sources(self, preview: Preview) -> None:
        for source in preview.sources:
            rows = f"{source.num_used:,}" + (f" of {source.num_rows:,}" if source.num_used < source.num_rows else "")
            self.line(source.name, indent=2, hanging=2)
            self.line(f"{rows} rows; {source.form}", indent=4, hanging=2)
            if source.files != (source.name,):
                named = ", ".join(source.files[:_MAX_FILES])
                more = len(source.files) - _MAX_FILES
                self.line(f"files: {named}{f' and {more:,} more' if more > 0 else ''}", indent=4, hanging=2)

    def examples(self, preview: Preview) -> None:
        if not preview.examples:
            return
        if preview.num_trained is not None:
            self.legend()
        for example in preview.examples:
            self._example(example, preview)

    def legend(self) -> None:
        """Print a sample of a trained token."""
        self.line()
        text = Text("Trained tokens look ")
        text.append_text(self._pieces([Piece("like this", is_trained=True)]))
        self.line(text.append("."))

    def _example(self, example: ShownExample, preview: Preview) -> None:
        self.line()
        number = f"{preview.items_are.removesuffix('s').capitalize()} {example.number:,} of {preview.num_items:,}"
        self.line(Text().append(number, _HEADING).append(f": {example.where}", FAINT), hanging=2)
        for part in example.parts:
            self.part(part)
        self.facts(example.facts)

    def part(self, part: PreviewPart) -> None:
        """Print a named part of an example."""
        trained = f", {part.num_trained:,} trained" if part.num_trained else ""
        name = Text().append(part.name, "bold").append(f": {part.num_tokens:,} tokens{trained}", FAINT)
        self.line(name, indent=2)
        text = self._pieces(part.pieces)
        # The newline that ends a part would print an empty line.
        if text.plain.endswith("\n"):
            text.right_crop(1)
        self.line(text, indent=4)
        self._pictures(part)

    def facts(self, facts: Mapping[str, str]) -> None:
        """Print an example's additional facts, one per line."""
        for fact, value in facts.items():
            self.line(Text().append(fact, "bold").append(f": {visible(value)}"), indent=2, hanging=2)

    def _pictures(self, part: PreviewPart) -> None:
        """Draw the images below the text, if the terminal supports it."""
        if not draws_pictures(self._console):
            return
        # A part may contain the same image several times; draw it once.
        pictures = {piece.text: piece.picture for piece in part.pieces if piece.picture is not None}
        for name, picture in pictures.items():
            if len(pictures) > 1:
                self.line(Text(name, FAINT), indent=4)
            print_picture(picture.pixels, self._console, self._environment, indent=4)

    def _pieces(self, pieces: Sequence[Piece]) -> Text:
        opening, closing = MARKS if self._is_plain else ("", "")
        text = Text()
        is_open = False
        for piece in pieces:
            if is_open and not piece.is_trained:
                text.append(closing)
            if piece.is_trained and not is_open:
                text.append(opening)
            is_open = piece.is_trained
            if piece.num_left_out:
                text.append(f" ... {piece.num_left_out:,} tokens ... ", LEFT_OUT)
            else:
                text.append(visible(piece.text), _TRAINED if piece.is_trained else "")
        text.append(closing if is_open else "")
        text.highlight_words(self._special_tokens, _SPECIAL)
        return text

    def lengths(self, preview: Preview) -> None:
        if not preview.lengths:
            return
        self.line()
        self.line(Text(f"Lengths of {preview.lengths_are} in tokens", _HEADING))
        for line in _histogram(preview, width=self._width - 2, sign="#" if self._is_plain else "█"):
            self.line(line, indent=2)
        figures = {name: quantile(preview.lengths, share) for name, share in _QUANTILES.items()}
        self.line(", ".join(f"{name} {length:,}" for name, length in figures.items()), indent=2)
        fits = preview.most_tokens <= preview.room
        advice = "" if fits else ", TOO LARGE TO TRAIN: raise sequence_parallel_size or train_max_tokens_per_gpu"
        sentence = f"{preview.most_is}; a micro-batch fits {preview.room:,} ({preview.room_is}){advice}"
        self.line(Text(sentence, "" if fits else LEFT_OUT), indent=2, hanging=2)

    def counts(self, preview: Preview) -> None:
        self.line()
        self.line(Text("Rows", _HEADING))
        tokens = f" of {preview.num_tokens:,} tokens" if preview.num_tokens is not None else ""
        self.line(f"{preview.num_rows:,} rows, {preview.num_items:,} {preview.items_are}{tokens}", indent=2)
        if preview.num_tokens and preview.num_trained is not None:
            share = preview.num_trained / preview.num_tokens
            self.line(f"{preview.num_trained:,} tokens are trained ({share:.1%})", indent=2)
        if preview.end_of_turn:
            self.line(f"turns end with {preview.end_of_turn}", indent=2)
        for happened in preview.happened:
            self.line(f"{happened.count:,} {happened.what}", indent=2, hanging=2)
            for row in happened.rows:
                self.line(Text(visible(row), FAINT), indent=4, hanging=2)
            if happened.rows and happened.count > len(happened.rows):
                self.line(Text(f"and {happened.count - len(happened.rows):,} more", FAINT), indent=4)
        if not any(happened.rows for happened in preview.happened):
            self.line("nothing is truncated or dropped", indent=2)
        self.line()


_QUANTILES = {"shortest": 0.0, "median": 0.5, "95 % up to": 0.95, "longest": 1.0}


def _histogram(preview: Preview, *, width: int, sign: str) -> Iterator[Text]:
    """Yield a line per bin, and a line at the limit."""
    bins = length_bins(preview.lengths, preview.limit)
    names = [f"{low:,}" if low == high else f"{low:,}-{high:,}" for low, high, _ in bins]
    name_width = max(map(len, names))
    count_width = max(len(f"{count:,}") for _, _, count in bins)
    # Four columns separate name, count and bar.
    bar_width = min(_MAX_BAR, width - name_width - count_width - 4)
    within = [entry for entry in bins if entry.high <= preview.limit]
    for name, entry in zip(names, bins, strict=True):
        if entry.low > preview.limit and entry is bins[len(within)]:
            yield _limit_line(preview)
        bar = sign * _bar_length(entry, bins, bar_width)
        style = "" if entry.high <= preview.limit else LEFT_OUT
        yield Text(f"{name:>{name_width}}  {entry.num_items:>{count_width},}  ").append(bar, style or "cyan")
    if len(within) == len(bins):
        yield _limit_line(preview)


def _bar_length(entry: Bin, bins: Sequence[Bin], width: int) -> int:
    """Return the bar width in columns, at least 1 unless the bin is empty."""
    most = max(other.num_items for other in bins)
    return max(1, round(entry.num_items / most * width)) if entry.num_items else 0


def _limit_line(preview: Preview) -> Text:
    above = sum(count for length, count in preview.lengths.items() if length > preview.limit)
    found = f"{above:,} {'is' if above == 1 else 'are'} longer" if above else "none is longer"
    return Text(f"--- {preview.limit_is}: {found} ---", LEFT_OUT)


def visible(text: str) -> str:
    """Escape control characters, which could change the terminal's state."""
    return "".join(
        char if char in _KEPT_CONTROLS or not unicodedata.category(char).startswith("C") else _spelled(char)
        for char in text
    )


def _spelled(char: str) -> str:
    # Zero-width joiners combine emojis and letters, and are harmless.
    if unicodedata.category(char) == "Cf" and char in "\u200d\u200c":
        return char
    return char.encode("unicode_escape").decode("ascii")
