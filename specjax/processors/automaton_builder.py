"""Uses outlines-core with limited memory; a script that `byte_automata` starts.

Standard input has what `marshal` writes: `path` (of Python's modules), the limits `memory` (bytes),
`states` and `characters`, and an `expression`, or a `schema`, its `space` and the `depth` of its
references. Standard output has, of an expression, 257 integers for each state, the start first: the
state after each byte or -1, and whether a text may end. Of a schema it has the expression.
"""

import itertools
import marshal
import sys
from array import array

try:
    import resource
except ImportError:  # Windows; the time is still limited
    resource = None  # type: ignore[assignment]

# A zero ends a text, and two begin it. So the library goes on after the `a` of `a|ab`: its search
# ends where the first of several alternatives does.
_END, _BEGIN, _EOS = 0, 256, 257


def main() -> None:
    """Answers one request; nothing of specjax can be imported here."""
    request = marshal.load(sys.stdin.buffer)
    sys.path[:] = request["path"]
    from outlines_core import Index, Vocabulary, json_schema

    if resource is not None:
        resource.setrlimit(resource.RLIMIT_AS, (request["memory"], request["memory"]))
    if "schema" in request:
        text = json_schema.build_regex_from_schema(
            request["schema"], request["space"], request["depth"]
        )
        sys.stdout.buffer.write(text[: request["characters"] + 1].encode())
        return
    tokens = {bytes([byte]): [byte] for byte in range(256)}
    vocabulary = Vocabulary(_EOS, {**tokens, b"\0\0": [_BEGIN]})
    # The empty alternative ends the library's search for matches that begin later, which doubles
    # its states with each character of a string of limited length.
    index = Index(rf"\x00\x00(?:{request['expression']})\x00|", vocabulary)
    steps = index.get_transitions()
    states = [steps[index.get_initial_state()][_BEGIN]]
    numbers = {states[0]: 0}
    # One more than allowed tells of too many; the list grows while it is read.
    for state in itertools.islice(states, request["states"] + 1):
        row = array("i", [-1] * 257)
        row[256] = steps[state].pop(_END, None) is not None
        for byte, after in sorted(steps[state].items()):
            if after not in numbers:
                numbers[after] = len(states)
                states.append(after)
            row[byte] = numbers[after]
        sys.stdout.buffer.write(row)


if __name__ == "__main__":
    main()
