"""The C module of `cpu/signals.c`."""

class Section:
    """A context of the main thread in which no handler of a signal runs; may be entered again inside."""

    def __enter__(self) -> None: ...
    def __exit__(self, *raised: object) -> None: ...

def pause_collector(begins: bool, /) -> int:
    """Begin or end a section of any thread; return how many there are."""

def forget() -> None:
    """End all sections, without the signals that came inside: in a forked child."""
