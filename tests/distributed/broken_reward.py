"""The command line with a reward that breaks on process 1 alone, in the first iteration."""

import os
import signal
import sys

from stepcredit.cli import main
from stepcredit.rewards import registry
from stepcredit.training import distributed

IMAGES_BEFORE = 12
"""More than process 1 judges in the self-test and the evaluation before."""


class Broken:
    """jpeg_size, until it has judged ``IMAGES_BEFORE`` images on process 1; then what ``how`` says."""

    def __init__(self, how="raises"):
        self.inner, self.how, self.judged = registry.get("jpeg_size"), how, 0
        self.info = self.inner.info

    def __call__(self, images, prompts, metadata):
        self.judged += len(images)
        if distributed.rank() == 1 and self.judged > IMAGES_BEFORE:
            if self.how == "raises":
                raise ZeroDivisionError("the reward of process 1 is broken")
            os.kill(os.getpid(), signal.SIGKILL if self.how == "killed" else signal.SIGTERM)
            self.judged = -(10**9)
        return self.inner(images, prompts, metadata)

    def self_test(self):
        return self.inner.self_test()


if __name__ == "__main__":
    registry.register("broken", Broken)
    sys.exit(main(sys.argv[1:]))
