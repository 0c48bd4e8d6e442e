"""How many GPUs train an 8B model on 200 billion tokens within a week?

    python -m experiments.examples.planning --days 7

Plans 32 to 512 H100s and stops at the first number that is fast enough. Nothing is run: a plan is
arithmetic over the model's own parameters, and takes seconds. What to conclude: the last number of
GPUs suffices; the rows before it say how many days fewer would take, and whether they cost less.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

import jaxinfra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--tokens", type=float, default=200e9)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--devices", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    parser.add_argument("--picture", type=Path, help="draw days by GPUs there")
    args = parser.parse_args()
    tried, days = [], []
    for count in args.devices:
        plan = jaxinfra.plan(args.model, devices=count, device=args.device)
        tried.append(count)
        days.append(plan.days(args.tokens))
        mesh, cost = plan.layout.describe(), plan.dollars(args.tokens)
        print(f"{count:4d} {args.device}: {mesh}, MFU {plan.mfu:.1%}, ", end="")
        print(f"{days[-1]:.1f} days, {cost:,.0f} dollars")
        if days[-1] <= args.days:
            print(f"{count} GPUs suffice, at {cost:,.0f} dollars")
            break
    else:
        print(f"{args.devices[-1]} GPUs are too few")
    if args.picture is not None:
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.subplots()
        axes.bar([str(count) for count in tried], days)
        axes.axhline(args.days, linestyle="--", color="gray")
        axes.set(xlabel=f"GPUs ({args.device})", ylabel="days (dashed: asked for)")
        figure.savefig(args.picture, dpi=120)


if __name__ == "__main__":
    main()
