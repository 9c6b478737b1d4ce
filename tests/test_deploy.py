"""Files of deploy/: what is installed is locked and is what the package needs, and each command
that they run is one that the server takes. Tools that check their formats do so where they are
installed: HELM names helm's program.
"""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sglang_lite.commands.config_file import ConfigFile
from sglang_lite.commands.parser import CommandParser
from sglang_lite.server import flags

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKER, COMPOSE, CHART = DEPLOY / "docker", DEPLOY / "compose", DEPLOY / "helm" / "sglang-lite"
UNIT = DEPLOY / "systemd" / "sglang-lite.service"
HELM = os.environ.get("HELM") or shutil.which("helm")
DOCKERFILE = (DOCKER / "Dockerfile").read_text()
SERVICES = yaml.safe_load((COMPOSE / "compose.yaml").read_text())["services"]


def read(*line):
    """The settings that a command line of `serve` says: of the server, of the engine, of several
    servers.
    """
    parser = CommandParser(prog="serve")
    flags.add_serve_flags(parser)
    parser.add_argument("--config", action=ConfigFile)
    return flags.read_serve_flags(parser.parse_args(line))


# ------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("lock", sorted(DOCKER.glob("*.lock")), ids=lambda lock: lock.name)
def test_the_lock_has_all_that_a_server_needs_in_versions_that_fit(lock):
    lines = [line for line in lock.read_text().splitlines() if line[0] not in "#-"]
    found = [re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), "a line that pip would not hold to one file"
    versions = {canonicalize_name(each[1]): each[2] for each in found if each}
    assert len(versions) == len(lines)
    for extra in ("", "server", "grpc", "tracing", "media", "gateway"):
        for each in needed(extra):
            version = versions[canonicalize_name(each.name)].partition("+")[0]
            assert each.specifier.contains(version), (
                f"{each} is locked at {version}: python deploy/docker/lock.py"
            )


def needed(extra):
    """Requirements of an extra, and of those that it names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["optional-dependencies"][extra] if extra else project["dependencies"]:
        each = Requirement(text)
        if each.name == "sglang-lite":
            for inner in each.extras:
                yield from needed(inner)
        else:
            yield each


def test_what_the_image_copies_is_there_for_each_lock():
    copied = [
        name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.M) for name in line.split()
    ]
    locks = {
        "requirements.lock",
        *re.findall(r"LOCK=(\S+\.lock)", DOCKERFILE + (COMPOSE / "compose.gpu.yaml").read_text()),
    }
    assert locks == {lock.name for lock in DOCKER.glob("*.lock")}
    assert all((ROOT / name.replace("$LOCK", lock)).exists() for name in copied for lock in locks)


def test_images_of_others_have_a_version():
    images = re.findall(r"^FROM (\S+)$", DOCKERFILE, re.M) + [
        each["image"] for each in SERVICES.values()
    ]
    images = [image for image in images if not image.startswith("sglang-lite:")]
    assert len(images) == 3
    assert all(re.search(r":v?\d+\.\d+\.\d+", image) for image in images)


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_hadolint_takes_the_dockerfile():
    told = subprocess.run(["hadolint", DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (told.returncode, told.stdout) == (0, "")


# ------------------------------------------------------------------------------------------ compose


def filled(text):
    """A line of the file with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_services_of_compose_are_commands_that_the_server_takes():
    entry = re.search(r'ENTRYPOINT \["sglang-lite", "serve", (.*)\]', DOCKERFILE)
    assert entry is not None
    shared = [part.strip(' "') for part in entry[1].split(",")]
    server, engine, _ = read(*shared, *map(filled, SERVICES["server"]["command"]))
    assert (server.port, engine["model"], engine["restart"]) == (30000, "smollm2-135m", True)
    _, _, several = read(*shared, *SERVICES["gateway"]["command"])
    assert (several.workers, several.replicas) == ((f"dns+http://server:{server.port}",), 0)
    (scraped,) = yaml.safe_load((COMPOSE / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped["dns_sd_configs"][0]["names"] == ["server"]
    assert scraped["dns_sd_configs"][0]["port"] == server.port
    (source,) = yaml.safe_load((COMPOSE / "grafana.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    extended = yaml.safe_load((COMPOSE / "compose.gpu.yaml").read_text())["services"]
    assert extended.keys() <= SERVICES.keys()


def test_the_files_that_compose_mounts_are_there():
    mounted = [
        each.split(":") for service in SERVICES.values() for each in service.get("volumes", ())
    ]
    files = {path: target for path, target, *_ in mounted if path.startswith(".")}
    assert len(files) == 4
    assert all((COMPOSE / path).exists() for path in files)
    (provider,) = yaml.safe_load((COMPOSE / "dashboards.yaml").read_text())["providers"]
    assert files["../grafana"] == provider["options"]["path"]


# ------------------------------------------------------------------------------------------ systemd


def test_the_unit_runs_a_command_that_the_server_takes(tmp_path):
    command = re.search(r"^ExecStart=\S+ serve (.*)$", UNIT.read_text(), re.M)
    assert command is not None
    line = command[1].replace("/etc/sglang-lite/server.yaml", str(UNIT.with_name("server.yaml")))
    for name in re.findall(r"^LoadCredential=(\w+):", UNIT.read_text(), re.M):
        (tmp_path / name).write_text(f"of-{name}\n")
    server, engine, _ = read(*line.replace("${CREDENTIALS_DIRECTORY}", str(tmp_path)).split())
    assert (server.api_key, server.admin_api_key, server.log_format) == (
        ("of-keys",),
        "of-admin",
        "json",
    )
    assert engine["restart"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/sglang-lite/bin/sglang-lite", "/bin/true"))
    told = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert (told.returncode, told.stderr) == (0, "")


# --------------------------------------------------------------------------------------- Kubernetes


def paths(value, at=()):
    """Dotted paths of a nested dictionary, to what is no dictionary or is empty."""
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from paths(each, (*at, key))
    else:
        yield ".".join(at)


def test_the_chart_uses_all_of_its_values_and_no_others():
    declared = set(paths(yaml.safe_load((CHART / "values.yaml").read_text())))
    texts = "".join(file.read_text() for file in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", texts))
    assert all(any(f"{path}.".startswith(f"{each}.") for each in used) for path in declared)
    assert all(any(f"{path}.".startswith(f"{each}.") for path in declared) for each in used)


def test_the_settings_of_the_chart_are_settings(tmp_path):
    settings = yaml.safe_load((CHART / "values.yaml").read_text())["settings"]
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(settings))
    assert read("--config", str(tmp_path / "server.yaml"))[0].log_format == "json"


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
@pytest.mark.parametrize(
    "values",
    [
        "",
        "secret=keys,modelsClaim=models,nodeSelector.a=b,settings.drain_s=5",
        "gateway.enabled=false",
    ],
)
def test_helm_takes_the_chart_and_its_parts_find_each_other(values):
    assert HELM is not None
    more = ["--set", values] if values else []
    for command in (["lint", "--strict", str(CHART)], ["template", "a", str(CHART)]):
        told = subprocess.run([HELM, *command, *more], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout + told.stderr
    parts = [*yaml.safe_load_all(told.stdout)]
    pods = [each["spec"]["template"] for each in parts if each["kind"] == "Deployment"]
    labels = [pod["metadata"]["labels"] for pod in pods]
    for each in parts:
        if each["kind"] == "Service":
            (pod,) = [
                pod
                for pod, own in zip(pods, labels)
                if each["spec"]["selector"].items() <= own.items()
            ]
            (container,) = pod["spec"]["containers"]
            assert container["ports"] == [{"name": "http", "containerPort": 30000}]
    names = {each["metadata"]["name"]: each["spec"] for each in parts if each["kind"] == "Service"}
    for pod in pods:
        (container,) = pod["spec"]["containers"]
        assert bool(container.get("env")) == ("secret" in values)
        if container["name"] == "gateway":
            server, _, several = read(*container["args"])
            (source,) = several.workers
            assert (
                names[source.removeprefix("dns+http://").removesuffix(":30000")]["clusterIP"]
                == "None"
            )
            assert pod["spec"]["terminationGracePeriodSeconds"] > server.drain_s
