"""How many GPUs train an 8B model on 200 billion tokens within a week?

    python -m experiments.copy.planning --days 7

Plans 32 to 512 H100s and stops at the first number that is fast enough. Nothing is run: a plan is
arithmetic over the model's own parameters, and takes seconds. What to conclude: below the number
printed no layout is fast enough; above it every further GPU costs more per token.
"""

import argparse

import jaxinfra


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--device", default="h100")
    parser.add_argument("--tokens", type=float, default=200e9)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--devices", type=int, nargs="+", default=[32, 64, 128, 256, 512])
    args = parser.parse_args()
    for count in args.devices:
        plan = jaxinfra.plan(args.model, devices=count, device=args.device)
        days = plan.days(args.tokens)
        mesh = plan.layout.describe()
        print(f"{count:4d} {args.device}: {mesh}, MFU {plan.mfu:.1%}, {days:.1f} days")
        if days <= args.days:
            print(f"{count} GPUs suffice, at {plan.dollars(args.tokens):,.0f} dollars")
            return
    print(f"{args.devices[-1]} GPUs are too few")


if __name__ == "__main__":
    main()
