"""linattn on numpy arrays: values, that nothing is copied, refusals, threads.

usage: test_numpy.py <directory of the module linattn_numpy>
"""

import sys
import threading
import tracemalloc

import numpy as np

sys.path.insert(0, sys.argv[1])
import linattn_numpy as linattn

N, D, M, H = 40, 4, 3, 2
rng = np.random.default_rng(1)


def inputs(dtype=np.float32, tokens=N):
    return [rng.standard_normal((tokens, H * dim)).astype(dtype) for dim in (D, D, M)]


def reference(q, k, v, causal=True):
    """out_i = sum_j phi(q_i).phi(k_j) v_j / sum_j phi(q_i).phi(k_j), phi = elu + 1, head by head; O(N^2)."""
    phi = lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    heads = []
    for h in range(H):
        w = phi(q[:, h * D : (h + 1) * D]) @ phi(k[:, h * D : (h + 1) * D]).T
        w = np.tril(w) if causal else w
        heads.append(w @ v[:, h * M : (h + 1) * M] / w.sum(1, keepdims=True))
    return np.hstack(heads)


def address(x):
    return x.__array_interface__["data"][0]


def refused(error, text, call):
    try:
        call()
    except error as e:
        assert text in str(e), f"'{text}' is not in: {e}"
        return
    raise AssertionError(f"not refused: {text}")


attn = linattn.attention(head_dim=D, heads=H, value_dim=M)
attn64 = linattn.attention64(head_dim=D, heads=H, value_dim=M)


def test_values():
    # Sums of 40 terms of size 1: 100 epsilons of the type.
    for operator, dtype, tolerance in ((attn, np.float32, 1e-5), (attn64, np.float64, 1e-13)):
        q, k, v = inputs(dtype)
        y = operator.forward_causal(q, k, v)
        assert y.dtype == dtype and y.flags.owndata and np.allclose(y, reference(q, k, v), rtol=0, atol=tolerance)
        y = operator.forward(q[:7], k, v)
        assert y.shape == (7, H * M) and np.allclose(y, reference(q, k, v, causal=False)[:7], rtol=0, atol=tolerance)
    assert attn.forward_causal(*inputs(tokens=0)).shape == (0, H * M)


def test_nothing_is_copied():
    tokens = 100_000
    q, k, v = inputs(tokens=tokens)
    out = np.empty((tokens, H * M), np.float32)
    before = address(out)
    tracemalloc.start()
    y = attn.forward_causal(q, k, v, out=out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert y is out and address(y) == before
    # numpy tells tracemalloc of its buffers: the smallest copy, one head of v, would be 1.2 MB.
    assert peak < 100_000, f"{peak} bytes were allocated"
    assert np.array_equal(out, attn.forward_causal(q, k, v))


def test_slices_are_seen_where_they_lie():
    q, k, v = inputs()
    wide = np.full((2 * N, 20), np.nan, np.float32)
    slices = wide[::2, :8], wide[::2, 8:16], wide[N - 1 :: -1, 14:20]
    for x, values in zip((slices[0], slices[1]), (q, k)):
        x[:] = values
    assert np.array_equal(attn.forward_causal(slices[0], slices[1], v), attn.forward_causal(q, k, v))

    # An output among other columns: those stay as they are. And rows from the last to the first.
    out = np.full((N, 9), 7, np.float32)
    attn.forward_causal(q, k, v, out=out[:, 2:8])
    assert np.array_equal(out[:, 2:8], attn.forward_causal(q, k, v)) and (out[:, [0, 1, 8]] == 7).all()
    flipped = [x[::-1] for x in (q, k, v)]
    assert np.array_equal(attn.forward_causal(*flipped), attn.forward_causal(*[x.copy() for x in flipped]))
    row = np.broadcast_to(q[:1], q.shape)
    assert np.array_equal(attn.forward_causal(row, k, v), attn.forward_causal(row.copy(), k, v))


def test_gradients():
    q, k, v = inputs(np.float64)
    dout = rng.standard_normal((N, H * M))
    # Central differences over 1e-5 in double: 1e-10 of rounding, 1e-10 of curvature, N values summed.
    step, tolerance = 1e-5, 1e-7
    for i, gradient in enumerate(attn64.vjp_causal(q, k, v, dout)):
        x = (q, k, v)[i]
        assert gradient.shape == x.shape
        direction = rng.standard_normal(x.shape)
        moved = lambda t: [y + t * direction if y is x else y for y in (q, k, v)]
        difference = (attn64.forward_causal(*moved(step)) - attn64.forward_causal(*moved(-step))) / (2 * step)
        assert abs((difference * dout).sum() - (gradient * direction).sum()) < tolerance


def test_streaming():
    q, k, v = inputs()
    expected = attn.forward_causal(q, k, v)
    state, y = attn.make_state(), np.empty(H * M, np.float32)
    assert np.array_equal(state.forward_causal(q[:9], k[:9], v[:9]), expected[:9])
    record = state.save()
    for i in range(9, N):
        state.step(q[i], k[i], v[i], y)
        # Another order of sums than a block's: 100 epsilons.
        assert np.allclose(y, expected[i], rtol=0, atol=1e-5)
    assert state.tokens == N
    other = attn.make_state()
    other.load(record)
    assert other.tokens == 9
    assert np.array_equal(other.forward_causal(q[9:], k[9:], v[9:]), attn_continued(record, q, k, v))
    state.reset()
    assert state.tokens == 0
    refused(ValueError, "linattn::load", lambda: state.load(record[:-1]))
    refused(ValueError, "linattn::load", lambda: state.load(b""))
    refused(ValueError, "linattn::load", lambda: linattn.attention(head_dim=D).make_state().load(record))
    assert state.tokens == 0


def attn_continued(record, q, k, v):
    state = attn.make_state()
    state.load(record)
    return state.forward_causal(q[9:], k[9:], v[9:])


def test_refusals():
    q, k, v = inputs()
    for call in (attn.forward, attn.forward_causal, attn.make_state().forward_causal):
        # Other types are not converted, nor are lists, nor another byte order.
        for wrong in (k.astype(np.float64), k.astype(np.float16), k.astype(np.int32), k.astype(">f4"), k.tolist()):
            refused(TypeError, "incompatible function arguments", lambda: call(q, wrong, v))
        refused(TypeError, "incompatible function arguments", lambda: call(q, k, v, out=np.empty((N, H * M))))
        refused(ValueError, "q has rows that are not contiguous", lambda: call(np.asfortranarray(q), k, v))
        refused(ValueError, "k has rows that are not contiguous", lambda: call(q, np.empty((N, 16), np.float32)[:, ::2], v))
        refused(ValueError, "k has rows that are not contiguous", lambda: call(q, k[:, ::-1], v))
        refused(ValueError, "v has 1 dimensions, not the 2", lambda: call(q, k, v[0]))
        refused(ValueError, "q has 3 dimensions, not the 2", lambda: call(q[None], k, v))
        packed = np.zeros(N, np.dtype([("x", np.float32, (H * D,)), ("flag", np.uint8)]))
        refused(ValueError, "k has strides that are no whole elements", lambda: call(q, packed["x"], v))
        odd = np.frombuffer(bytearray(4 * q.size + 1), np.float32, q.size, offset=1).reshape(q.shape)
        refused(ValueError, "q is not aligned", lambda: call(odd, k, v))
        frozen = np.zeros((N, H * M), np.float32)
        frozen.flags.writeable = False
        refused(ValueError, "out is read-only", lambda: call(q, k, v, out=frozen))
        refused(ValueError, "rows of an output overlap",
                lambda: call(q, k, v, out=np.lib.stride_tricks.as_strided(v.copy(), v.shape, (4, 4))))
        refused(ValueError, "an output overlaps an input", lambda: call(q, k, v, out=v))
        # Slices of one array that interleave, and share nothing.
        shared = np.zeros((2 * N, q.shape[1] + H * M), np.float32)
        shared[:N, : q.shape[1]] = q
        call(shared[:N, : q.shape[1]], k, v, out=shared[::2, q.shape[1] :])
        refused(ValueError, "an output overlaps an input",
                lambda: call(shared[:N, : q.shape[1]], k, v, out=shared[::2, : H * M]))
        # The library's own sentences, with both sizes.
        refused(ValueError, "out is (39, 6)", lambda: call(q, k, v, out=np.zeros((N - 1, H * M), np.float32)))
        refused(ValueError, "v is (40, 8)", lambda: call(q, k, k))
    refused(ValueError, "linattn::forward_causal: k is (39, 8)", lambda: attn.forward_causal(q, k[1:], v))
    refused(ValueError, "linattn::vjp_causal: dout is (40, 8)", lambda: attn.vjp_causal(q, k, v, q))
    refused(ValueError, "q has 1 dimensions", lambda: attn.vjp_causal(q[0], k, v, v))
    refused(ValueError, "head_dim", lambda: linattn.attention(head_dim=0))

    step, y = attn.make_state().step, np.zeros(H * M, np.float32)
    refused(ValueError, "k must be one token of 8 elements", lambda: step(q[0], k[0, 1:], v[0], y))
    refused(ValueError, "q must be one token of 8 elements", lambda: step(q, k[0], v[0], y))
    refused(ValueError, "out must be one token of 6 elements", lambda: step(q[0], k[0], v[0], np.zeros(7, np.float32)))
    refused(ValueError, "k is not contiguous", lambda: step(q[0], np.zeros(16, np.float32)[::2], v[0], y))
    refused(ValueError, "an output overlaps an input", lambda: step(q[0], k[0], v[0], v[0]))
    refused(TypeError, "incompatible function arguments", lambda: step(q[0], k[0], v[0], np.zeros(H * M)))
    y.flags.writeable = False
    refused(ValueError, "out is read-only", lambda: step(q[0], k[0], v[0], y))


def test_other_threads_run_during_a_call():
    """With a switch interval of minutes another thread comes in only where the interpreter is given up: in the call."""
    q, k, v = inputs(tokens=20_000)
    out = np.empty((len(q), H * M), np.float32)
    go, ran = threading.Lock(), []
    go.acquire()
    thread = threading.Thread(target=lambda: (go.acquire(), ran.append(True)))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(600)
    try:
        go.release()
        # When it gets a core is the system's affair, hence many calls; kept waiting, it comes in after none of them.
        for calls in range(500):
            attn.forward_causal(q, k, v, out=out)
            if ran:
                break
    finally:
        sys.setswitchinterval(interval)
    assert ran, "no other thread ran during 500 calls"
    thread.join()


for name, test in list(globals().items()):
    if name.startswith("test_"):
        test()
        print("passed:", name)
