import dataclasses

import pytest

from specjax.cli import gin_config, main


@dataclasses.dataclass(frozen=True)
class Wheel:
    size: float = 1.0


def car(wheel, name, *, doors=4):
    if doors < 0:
        raise ValueError(f"doors={doors} must not be negative")
    if name == "disk":
        raise OSError("disk is full")
    return wheel, name, doors


@pytest.fixture(autouse=True)
def registered():
    gin_config.register(Wheel, vehicle=car)


@pytest.fixture
def files(tmp_path):
    root = tmp_path / "gin_configs"
    (root / "parts").mkdir(parents=True)
    (root / "runs").mkdir()
    (root / "parts" / "wheel.gin").write_text("SIZE = 2.0\nWheel.size = %SIZE\n")
    run = root / "runs" / "car.gin"
    run.write_text(
        "include 'parts/wheel.gin'\nNAME = %gin.REQUIRED\nDOORS = 2\n"
        "vehicle.name = %NAME\nvehicle.doors = %DOORS\nvehicle.wheel = @Wheel()\n"
    )
    return [str(run)]


def call(files, *bindings):
    gin_config.configure(files, bindings)
    return gin_config.call(car)


def test_values_come_from_files_includes_and_overrides(files):
    assert call(files, "NAME=beetle") == (Wheel(2.0), "beetle", 2)
    assert call(files, "NAME='beetle'", "DOORS=5", "Wheel.size=3.5") == (Wheel(3.5), "beetle", 5)
    # Nothing is left over from an earlier call.
    assert call(files, "NAME=vw") == (Wheel(2.0), "vw", 2)


@pytest.mark.parametrize("value", ["/data/multi 30k", "a.b-c", "C:\\x", "it's", ""])
def test_paths_need_no_quotes(files, value):
    assert call(files, f"NAME={value}")[1] == value


@pytest.mark.parametrize(
    ("text", "value"), [("None", None), ("(1, 2)", (1, 2)), ("1e-3", 1e-3), ("True", True)]
)
def test_literals_are_parsed(files, text, value):
    assert call(files, f"NAME={text}")[1] == value


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        ([], "required but not given: NAME; add --gin.NAME=..."),
        (["NAM=x"], "--gin.NAM: no such name; did you mean NAME? The gin files define SIZE, NAME"),
        (["NAME"], "--gin.NAME: must have the form --gin.NAME=value"),
        (["NAME=x", "vehicle.dors=1"], "doesn't have a parameter named 'dors'"),
        (["NAME=x", "boat.sail=1"], "No configurable matching 'boat'"),
        (["NAME=@"], "--gin.NAME=@: @ is not a gin reference"),
        (["NAME=x", "DOORS=-1"], "doors=-1 must not be negative"),
        (["NAME=disk"], "disk is full"),
    ],
)
def test_errors_are_one_clear_line(files, bindings, message):
    with pytest.raises((ValueError, OSError)) as error:
        call(files, *bindings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_files_and_syntax_errors_are_told(files, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--gin_file=absent\.gin: no such file"):
        gin_config.configure(["absent.gin"], [])
    broken = tmp_path / "broken.gin"
    broken.write_text("NAME = = 3\n")
    with pytest.raises(ValueError, match=r"broken\.gin") as error:
        gin_config.configure([str(broken)], [])
    assert "\n" not in str(error.value)
    broken.write_text("include 'nowhere.gin'\n")
    with pytest.raises(FileNotFoundError, match=r"broken\.gin: include 'nowhere\.gin' is not"):
        gin_config.configure([str(broken)], [])


def test_an_argument_without_a_value_is_told(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text("vehicle.doors = 3\n")
    gin_config.configure([str(path)], [])
    with pytest.raises(ValueError, match="wheel") as error:
        gin_config.call(car)
    assert "\n" not in str(error.value)


def test_the_short_form_reaches_the_command(files, monkeypatch, capsys):
    seen = {}

    class Command:
        add_arguments = staticmethod(gin_config.add_arguments)

        @staticmethod
        def run(args):
            seen["car"] = call(args.gin_file, *args.gin_binding)
            return 0

    monkeypatch.setattr(main, "COMMANDS", {"drive": ("drive", "drives")})
    monkeypatch.setattr(main.importlib, "import_module", lambda _: Command)
    arguments = ["drive", f"--gin_file={files[0]}", "--gin.NAME=vw", "--gin.DOORS=7"]
    assert main.main(arguments) == 0
    assert seen["car"] == (Wheel(2.0), "vw", 7)
    assert main.main([*arguments, "--gin.WINGS=2"]) == 2
    assert capsys.readouterr().err.startswith("specjax drive: --gin.WINGS: no such name")
