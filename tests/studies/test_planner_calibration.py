from pathlib import Path

import pytest

from launch.studies.planner_calibration import main

HEAD = "source,model,layers,hidden,heads,seq,gpus,zero,mbs,gbs,step_s,tok_s_gpu,mem_gb,gpu"
ROWS = (
    "a table,Llama-2-7B,32,4096,32,4096,8,3,2,64,11.0,,60,A100-80",
    "a table,Llama-2-7B,32,4096,32,4096,8,3,2,64,,4000,,H100",
    "a table,Llama-2-7B,32,4096,32,4096,8,3,2,64,,,,abacus",
)


def test_rows_of_a_table_are_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs.csv"
    file.write_text("\n".join((HEAD, *ROWS)))
    assert main([str(file)]) == 0
    captured = capsys.readouterr()
    assert "step: 2 rows, median" in captured.out
    assert "memory: 1 rows, median" in captured.out
    assert "intervals of 80 % hold in" in captured.out
    assert f"{file}:4: ConfigError" in captured.err
