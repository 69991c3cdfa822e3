"""The command line, in which every process tells how many numbers of each network it holds once they are shared out."""

import sys

from stepcredit.cli import main
from stepcredit.training import distributed, sharding


def held(module):
    """Numbers that this process holds, and all there are, of a network without its adapters; then of the adapters."""
    parameters = [(".lora_" in name, parameter) for name, parameter in module.named_parameters()]
    return [
        sum(count(p) for is_adapter, p in parameters if is_adapter == adapters)
        for adapters in (False, True)
        for count in (lambda p: sharding.local(p).numel(), lambda p: p.numel())
    ]


if __name__ == "__main__":
    share = sharding.shard

    def told(policy):
        share(policy)
        for name, module in (("transformer", policy.pipe.transformer), ("reference", policy.reference)):
            if module is not None:
                print("HELD", name, distributed.rank(), *held(module), file=sys.__stdout__, flush=True)

    sharding.shard = told
    sys.exit(main(sys.argv[1:]))
