// rotary_adjacent: (x[2j], x[2j+1]) turned by an angle: GPT-J's pairs  Source: fastllm, NearlyRotatePosition2D
// Shapes:  data [num_tokens, stride] f32, in place: query heads, key heads, values; positions [num_tokens] i32;
//          cosines, sines [4096, head_dim / 2] f32; cos_sin [4096, head_dim / 2] float2
// Problem: rotary_adjacent
// Sizes:   num_tokens 1, 2048; num_attention_heads 32; num_key_value_heads 8; head_dim 128
// Check:   num_tokens 1, 7; num_attention_heads 6; num_key_value_heads 2; head_dim 16, 80
// Check:   num_tokens 3; num_attention_heads 4; num_key_value_heads 4; head_dim 128
// Claim:   pair_a_load < thread_a_pair at num_tokens 2048: both numbers of a pair come in one load
// Claim:   packed < pair_a_load at num_tokens 2048: two pairs a load, and their angles in another
// Note:    These pairs lie side by side, so a load can bring a whole pair. With LLaMA's pairs (study rotary) a thread
//          needs two loads, but each of them is as wide.

// rung thread_a_pair: the article's kernel: a thread a pair, a block a head of a token. The loads of a warp step over
//   every second number, so its lanes need twice the lines of memory for a load, and for the next one the same again.
// launch: thread_a_pair<<<num_tokens * (num_attention_heads + num_key_value_heads), head_dim / 2>>>
__global__ void thread_a_pair(float* data, const int* positions, const float* cosines, const float* sines,
                              int num_attention_heads, int num_key_value_heads, int head_dim, int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads, j = threadIdx.x;
    const int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    const int place = positions[token] * (head_dim / 2) + j;
    const float cosine = cosines[place], sine = sines[place];
    float* x = data + size_t(token) * stride + head * head_dim + 2 * j;
    const float a = x[0], b = x[1];
    x[0] = a * cosine - b * sine;
    x[1] = a * sine + b * cosine;
}

// rung pair_a_load: a pair is one load of 8 bytes, and so are its cosine and sine in a table that has them together.
// launch: pair_a_load<<<num_tokens * (num_attention_heads + num_key_value_heads), head_dim / 2>>>
__global__ void pair_a_load(float* data, const int* positions, const float* cos_sin, int num_attention_heads,
                            int num_key_value_heads, int head_dim, int stride) {
    const int num_heads = num_attention_heads + num_key_value_heads, j = threadIdx.x;
    const int token = blockIdx.x / num_heads, head = blockIdx.x % num_heads;
    const float2 angle = reinterpret_cast<const float2*>(cos_sin)[positions[token] * (head_dim / 2) + j];
    float2* x = reinterpret_cast<float2*>(data + size_t(token) * stride + head * head_dim) + j;
    const float2 pair = *x;
    *x = make_float2(pair.x * angle.x - pair.y * angle.y, pair.x * angle.y + pair.y * angle.x);
}

// rung packed: two pairs a load of 16 bytes, two such loads a thread, 128 threads for whatever heads there are.
// launch: packed<<<dim3(num_tokens, ((num_attention_heads + num_key_value_heads) * head_dim / 8 + 127) / 128), 128>>>
__global__ void packed(float* data, const int* positions, const float* cos_sin, int num_attention_heads,
                       int num_key_value_heads, int head_dim, int stride) {
    // The two loads of a thread are half a head apart, so that those of neighbours are adjacent.
    const int packs = head_dim / 8;
    const int index = blockIdx.y * blockDim.x + threadIdx.x, head = index / packs, first = index % packs;
    if (head >= num_attention_heads + num_key_value_heads) return;
    float4* x = reinterpret_cast<float4*>(data + size_t(blockIdx.x) * stride + head * head_dim);
    const float4* angles = reinterpret_cast<const float4*>(cos_sin + size_t(positions[blockIdx.x]) * head_dim);
    const float4 a = x[first], b = x[first + packs], c = angles[first], d = angles[first + packs];
    x[first] = make_float4(a.x * c.x - a.y * c.y, a.x * c.y + a.y * c.x, a.z * c.z - a.w * c.w, a.z * c.w + a.w * c.z);
    x[first + packs] =
        make_float4(b.x * d.x - b.y * d.y, b.x * d.y + b.y * d.x, b.z * d.z - b.w * d.w, b.z * d.w + b.w * d.z);
}
