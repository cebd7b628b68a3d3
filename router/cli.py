"""The command: kvroute serve | check | demo | simulate."""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from kvroute import __version__
from kvroute.config import Config, ConfigError, PolicyKinds, config_for_instances, load_config
from kvroute.policies.registry import PolicyLoadError, load_policies
from kvroute.prompt.tokenizer import PromptSetupError


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["simulate"]:
        # The simulator has a command line of its own.
        from kvroute.simulator.__main__ import main as simulate

        return simulate(words[1:])
    options = _parser().parse_args(words)
    command = {"serve": _serve, "check": _check, "demo": _demo}[options.command]
    try:
        return command(options)
    except (ConfigError, PolicyLoadError, PromptSetupError) as error:
        print(error, file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvroute", description="A cache-aware request router for LLM engines.")
    parser.add_argument("--version", action="version", version=f"kvroute {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the gateway", description="Run the gateway.")
    serve.add_argument("config", nargs="?", type=Path, help="YAML file; or name instances with --instance")
    serve.add_argument("--instance", action="append", default=[], metavar="URL", help="an engine; may be repeated")
    serve.add_argument(
        "--tokenizer", metavar="FOLDER", help="the model's folder; without it prompts are hashed as text"
    )
    serve.add_argument("--policy", metavar="NAME", help="default: min_prefill")
    serve.add_argument("--redis", metavar="URL", help="shared index; default: in memory")
    serve.add_argument("--listen", metavar="HOST:PORT", help="default: 0.0.0.0:8000")
    serve.add_argument("--admin", metavar="HOST:PORT", help="default: 127.0.0.1:8001")

    check = commands.add_parser("check", help="read a configuration and say what was understood")
    check.add_argument("config", type=Path)

    demo = commands.add_parser("demo", help="long sessions on simulated instances: round_robin against min_prefill")
    demo.add_argument("--instances", type=_at_least_one, default=4, help="default: %(default)s")
    demo.add_argument("--sessions", type=_at_least_one, default=20, help="default: %(default)s")
    demo.add_argument(
        "--time-scale", type=_positive, default=3.0, help="simulated seconds a second; default: %(default)s"
    )
    demo.add_argument(
        "--port", type=_port, default=8000, help="the gateway's port, or any if taken; default: %(default)s"
    )
    demo.add_argument("--exit", action="store_true", help="end after the comparison instead of staying up")

    commands.add_parser("simulate", help="run one simulated engine; has its own --help")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("must be more than 0")
    return number


def _port(text: str) -> int:
    number = int(text)
    if not 0 < number < 65536:
        raise argparse.ArgumentTypeError("must be a port, 1 to 65535")
    return number


def _configure_logging() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def _serve(options: argparse.Namespace) -> int:
    import uvloop

    from kvroute.app import serve

    kinds = load_policies()
    config = _serve_config(options, kinds)
    _configure_logging()

    def started(public: str, admin: str | None) -> None:
        admin_text = f", admin on {admin}" if admin else ""
        print(f"kvroute {__version__} serves on {public}{admin_text}", file=sys.stderr, flush=True)

    try:
        uvloop.run(serve(config, kinds=kinds, started=started))
    except OSError as error:
        print(f"kvroute: {error.strerror or error}", file=sys.stderr)
        return 1
    return 0


def _serve_config(options: argparse.Namespace, kinds: PolicyKinds) -> Config:
    if options.config is not None:
        given = [name for name in ("tokenizer", "policy", "redis", "listen", "admin") if getattr(options, name)]
        if options.instance or given:
            names = ", ".join(f"--{name}" for name in (["instance"] if options.instance else []) + given)
            print(f"kvroute serve: {names} and a configuration file exclude one another", file=sys.stderr)
            raise SystemExit(2)
        return load_config(options.config, os.environ, kinds)
    if not options.instance:
        print("kvroute serve: give a configuration file, or instances with --instance URL", file=sys.stderr)
        raise SystemExit(2)
    return config_for_instances(
        options.instance,
        listen=options.listen,
        admin=options.admin,
        tokenizer=options.tokenizer,
        policy=options.policy,
        redis=options.redis,
        kinds=kinds,
    )


def _check(options: argparse.Namespace) -> int:
    from kvroute.config_describe import describe

    print(describe(load_config(options.config, os.environ, load_policies()), os.fspath(options.config)))
    return 0


def _demo(options: argparse.Namespace) -> int:
    from kvroute.demo import run_demo

    return asyncio.run(
        run_demo(
            instances=options.instances,
            sessions_count=options.sessions,
            time_scale=options.time_scale,
            port=options.port,
            stay=not options.exit,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
