# about 150 s. Bits first (kernel tests, then whole runners), then times: products alone, parts left out, prompts of 8B.
s=Llama-3.1-8B; [ -e /dev/shm/$s-int8 ] || python3 -c "
from pathlib import Path
from llmcli.checkpoint.random_weights import write_shape
write_shape('$s','int8',Path('/dev/shm/$s-int8'),lambda *a: None)" &
timeout 60 python3 -m pytest -q -m cuda -x -p no:cacheprovider tests/kernels/test_stage_wide.py 2>&1 | tail -3
timeout 60 python3 -m pytest -q -m cuda -x -p no:cacheprovider tests/kernels/test_gemm_wide.py -k "types_and_tails or same_beside" 2>&1 | tail -5
wait
timeout 60 python3 card-requests/time_wide.py times > $OUT/times.txt 2>&1
timeout 60 python3 card-requests/time_wide.py parts > $OUT/parts.txt 2>&1
for w in before wide before wide; do timeout 60 python3 card-requests/prompts.py /dev/shm/$s-int8 $w /tmp/$w.npy 2>&1 | tail -6; done
python3 -c "
import numpy as np
a, b = np.load('/tmp/wide.npy'), np.load('/tmp/before.npy')
print('logits differ by', abs(a - b).max(axis=1) / abs(b).max(axis=1))"
for k in "any_number" "swiglu and int8" "swiglu and int4" "every_launch or nan_shows"; do
 ( timeout 100 python3 -m pytest -q -m cuda -p no:cacheprovider tests/kernels/test_gemm_wide.py -k "$k" 2>&1 | tail -2 ) & done
( timeout 100 python3 -m pytest -q -m cuda -p no:cacheprovider tests/runners/test_cuda_runner.py 2>&1 | tail -3 ) &
wait; grep LAYER $OUT/times.txt $OUT/parts.txt; tail -30 $OUT/times.txt
