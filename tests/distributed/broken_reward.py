"""The command line with a jpeg_size that breaks on process 1, in the first iteration, as the first argument says."""

import os
import signal
import sys

from stepcredit.cli import main
from stepcredit.rewards import registry
from stepcredit.training import distributed

IMAGES_BEFORE = 12
"""More than process 1 judges in the self-test and the evaluation before."""


class Broken:
    """jpeg_size, until it has judged ``IMAGES_BEFORE`` images on process 1; then it raises or signals itself."""

    def __init__(self, inner, how):
        self.inner, self.how, self.judged = inner, how, 0
        self.info = inner.info

    def __call__(self, images, prompts, metadata):
        self.judged += len(images)
        if distributed.rank() == 1 and self.judged > IMAGES_BEFORE:
            if self.how == "raises":
                raise ZeroDivisionError("the reward of process 1 is broken")
            os.kill(os.getpid(), signal.Signals[self.how])
            self.judged = -(10**9)
        return self.inner(images, prompts, metadata)

    def self_test(self):
        return self.inner.self_test()


if __name__ == "__main__":
    how, *arguments = sys.argv[1:]
    whole = registry.get("jpeg_size")
    registry._registered["jpeg_size"] = lambda: Broken(whole, how)
    sys.exit(main(arguments))
