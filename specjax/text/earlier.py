"""The last answers to each prompt, from which drafts of later answers are copied."""

import threading
from collections import OrderedDict, deque

import numpy as np
from jaxtyping import Int32

# The most tokens that are kept, of prompts and answers: 256 MiB.
MOST_TOKENS = 2**26


class EarlierAnswers:
    """The last answers to each prompt, at most `each`, in the host's memory.

    If they and their prompts have more than 2**26 tokens, the prompt that was used least recently
    goes with its answers. Several threads may use it.
    """

    def __init__(self, each: int) -> None:
        self._each, self._size = each, 0
        self._answers: OrderedDict[bytes, deque[np.ndarray]] = OrderedDict()
        self._counts: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def of(
        self, prompt: Int32[np.ndarray, " L"], seed: int = 0
    ) -> tuple[list[Int32[np.ndarray, " N"]], int]:
        """Returns the tokens of the answers to a prompt, the last answer first, and a new seed.

        The seed of a row that copies them: the numbers that verify drafts must not be those from
        which the answers were drawn, or the row would not follow its distribution.
        """
        key = prompt.tobytes()
        with self._lock:
            if key not in self._answers:
                return [], seed
            self._answers.move_to_end(key)
            (new,) = np.random.SeedSequence([seed, self._counts[key]]).generate_state(1)
            return [*reversed(self._answers[key])], int(new)

    def keep(self, prompt: Int32[np.ndarray, " L"], answer: Int32[np.ndarray, " N"]) -> None:
        """Adds the tokens of an answer, with its end of sequence."""
        key = prompt.tobytes()
        with self._lock:
            answers = self._answers.pop(key, None)
            if answers is None:
                answers = deque()
                self._size += prompt.size
            self._answers[key] = answers
            self._counts[key] = self._counts.get(key, 0) + 1
            answers.append(answer)
            self._size += answer.size
            if len(answers) > self._each:
                self._size -= answers.popleft().size
            while self._size > MOST_TOKENS and len(self._answers) > 1:
                oldest, gone = self._answers.popitem(last=False)
                self._size -= len(oldest) // prompt.itemsize + sum(one.size for one in gone)
                del self._counts[oldest]
