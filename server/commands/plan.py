"""`headroom plan`: what a checkpoint's KV cache costs, from its config.json alone."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from model.fetch import resolve_config
from server.commands.interrupts import importing
from server.tools.plan import PlanOptions, make_plan
from server.tools.plan_advice import advise


def plan(args: argparse.Namespace, model: str, hub_endpoint: str | None) -> int:
    """Print what the flags ask for; the exit code. Raises ModelError or ConfigError, one line each."""
    options = PlanOptions(
        attention=args.attention,
        context=args.context,
        users=args.users,
        kv_memory=args.kv_memory,
        dtypes=() if args.dtype is None else (args.dtype,),
        block_size=args.block_size,
    )
    config = resolve_config(model, hub_endpoint=hub_endpoint)
    made = make_plan(model, config, options)
    advice = advise(config, made, options.attention)
    if args.json:
        report: Mapping[str, Any] = asdict(made) | {"advice": [asdict(each) for each in advice]}
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        with importing():
            from server.commands.plan_table import print_plan
        print_plan(made, advice)
    return 0
