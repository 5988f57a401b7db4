/* The C interface from C: values against a loop, states, gradients against differences, and every refusal. */
#include "linattn.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  tokens = 23,
  head_dim = 4,
  value_dim = 3,
  heads = 2,
  key_cols = heads * head_dim,
  value_cols = heads * value_dim
};

static int failures = 0;

static void check(int is_right, const char* what, int line) {
  if (is_right) return;
  ++failures;
  fprintf(stderr, "line %d: %s; last error: %s\n", line, what, linattn_last_error());
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)
#define REFUSED(call, text)                                                                                        \
  check((call) == LINATTN_INVALID_ARGUMENT && strstr(linattn_last_error(), text) != NULL, #call " refused: " text, \
        __LINE__)

static void fill(float* x, size_t n, unsigned seed) {
  for (size_t i = 0; i < n; ++i) {
    seed = seed * 1664525u + 1013904223u;
    x[i] = (float)(seed >> 8) / (float)(1u << 23) - 1.0f;
  }
}

static float q[tokens * key_cols], k[tokens * key_cols], v[tokens * value_cols], dout[tokens * value_cols];
static float log_decay[tokens * heads], beta[tokens * heads];

static linattn_input rows(const float* data, int64_t n, int64_t cols) {
  linattn_input x = {NULL, 0, 0, 0};
  x.data = data;
  x.rows = n;
  x.cols = x.row_stride = cols;
  return x;
}
static linattn_output to(float* data, int64_t n, int64_t cols) {
  linattn_output x = {NULL, 0, 0, 0};
  x.data = data;
  x.rows = n;
  x.cols = x.row_stride = cols;
  return x;
}

static linattn_attention* make(const char* map, const char* rule) {
  linattn_attention* attention = NULL;
  linattn_options options = {NULL, NULL, head_dim, value_dim, heads, 0};
  options.feature_map = map;
  options.rule = rule;
  CHECK(linattn_attention_create(&options, &attention) == LINATTN_OK);
  return attention;
}

static double map_of(const char* map, double x) {
  if (strcmp(map, "relu") == 0) return x > 0 ? x : 0;
  if (strcmp(map, "identity") == 0) return x;
  return x > 0 ? x + 1 : exp(x);
}

/* S = exp(g) S, S += beta phi(k) (v - S^T phi(k) if it corrects)^T, out = S^T phi(q), divided where it is additive. */
static void reference(const char* map, const char* rule, float* out) {
  const int decays = strncmp(rule, "gated", 5) == 0, corrects = strstr(rule, "delta") != NULL;
  const int normalizes = !decays && !corrects && strcmp(map, "identity") != 0;
  for (int h = 0; h < heads; ++h) {
    double s[head_dim][value_dim] = {{0}}, z[head_dim] = {0};
    for (int i = 0; i < tokens; ++i) {
      const double decay = decays ? exp((double)log_decay[i * heads + h]) : 1;
      const double b = corrects ? (double)beta[i * heads + h] : 1;
      double denominator = 0, write[value_dim];
      for (int m = 0; m < value_dim; ++m) {
        write[m] = (double)v[i * value_cols + h * value_dim + m];
        for (int c = 0; c < head_dim; ++c) {
          s[c][m] *= decay;
          if (corrects) write[m] -= s[c][m] * map_of(map, (double)k[i * key_cols + h * head_dim + c]);
        }
      }
      for (int c = 0; c < head_dim; ++c) {
        const double key = map_of(map, (double)k[i * key_cols + h * head_dim + c]);
        z[c] += key;
        for (int m = 0; m < value_dim; ++m) s[c][m] += b * key * write[m];
        denominator += z[c] * map_of(map, (double)q[i * key_cols + h * head_dim + c]);
      }
      for (int m = 0; m < value_dim; ++m) {
        double sum = 0;
        for (int c = 0; c < head_dim; ++c) sum += s[c][m] * map_of(map, (double)q[i * key_cols + h * head_dim + c]);
        if (normalizes) sum = denominator == 0 ? 0 : sum / denominator;
        out[i * value_cols + h * value_dim + m] = (float)sum;
      }
    }
  }
}

/* Sums of up to 23 terms of size 1 or so in float, which round a few dozen times: 1e-5 is 100 epsilons. */
static const double tolerance = 1e-5;

static int close_to(const float* a, const float* b, int n) {
  for (int i = 0; i < n; ++i) {
    if (!(fabs((double)a[i] - (double)b[i]) <= tolerance * (1 + fabs((double)b[i])))) return 0;
  }
  return 1;
}

static void test_values(const char* map, const char* rule) {
  const int decays = strncmp(rule, "gated", 5) == 0, corrects = strstr(rule, "delta") != NULL;
  linattn_attention* attention = make(map, rule);
  linattn_state *state = NULL, *copy = NULL;
  linattn_gates gates = {{NULL, 0, 0, 0}, {NULL, 0, 0, 0}};
  float expected[tokens * value_cols], out[tokens * (value_cols + 1)], again[value_cols];
  const int half = tokens / 2;

  if (decays) gates.log_decay = rows(log_decay, half, heads);
  if (corrects) gates.beta = rows(beta, half, heads);
  reference(map, rule, expected);
  CHECK(linattn_state_create(attention, &state) == LINATTN_OK);
  linattn_attention_destroy(attention); /* the state goes on without it */

  /* Half of it at once, into every row's first columns, the rest token by token. */
  fill(out, tokens * (value_cols + 1), 9);
  const float untouched = out[value_cols];
  linattn_output strided = to(out, half, value_cols);
  strided.row_stride = value_cols + 1;
  CHECK(linattn_forward_causal(state, rows(q, half, key_cols), rows(k, half, key_cols), rows(v, half, value_cols),
                               decays || corrects ? &gates : NULL, strided) == LINATTN_OK);
  CHECK(out[value_cols] == untouched);
  for (int i = 0; i < half; ++i) CHECK(close_to(out + i * (value_cols + 1), expected + i * value_cols, value_cols));
  CHECK(linattn_state_tokens(state) == half);
  CHECK(linattn_state_copy(state, &copy) == LINATTN_OK);
  for (int i = half; i < tokens; ++i) {
    CHECK(linattn_step(state, q + i * key_cols, k + i * key_cols, v + i * value_cols,
                       decays ? log_decay + i * heads : NULL, corrects ? beta + i * heads : NULL, again) == LINATTN_OK);
    CHECK(close_to(again, expected + i * value_cols, value_cols));
  }
  CHECK(linattn_state_tokens(state) == tokens && linattn_state_tokens(copy) == half);

  /* Saved, reset, loaded: the next token is the same, bit for bit. */
  const size_t bytes = linattn_state_saved_bytes(copy);
  char* record = malloc(bytes);
  CHECK(bytes > 0 && record != NULL);
  CHECK(linattn_state_save(copy, record, bytes) == LINATTN_OK);
  CHECK(linattn_state_reset(state) == LINATTN_OK && linattn_state_tokens(state) == 0);
  CHECK(linattn_state_load(state, record, bytes) == LINATTN_OK && linattn_state_tokens(state) == half);
  linattn_state* both[] = {copy, state};
  for (int i = 0; i < 2; ++i) {
    CHECK(linattn_step(both[i], q + half * key_cols, k + half * key_cols, v + half * value_cols,
                       decays ? log_decay + half * heads : NULL, corrects ? beta + half * heads : NULL,
                       i == 0 ? again : out) == LINATTN_OK);
  }
  CHECK(memcmp(again, out, sizeof again) == 0);

  REFUSED(linattn_state_save(copy, record, bytes - 1), "the record takes");
  REFUSED(linattn_state_load(state, record, bytes - 1), "linattn::load");
  record[bytes / 2] = (char)(record[bytes / 2] ^ 1);
  REFUSED(linattn_state_load(state, record, bytes), "linattn::load");
  CHECK(linattn_state_tokens(state) == half + 1);
  free(record);

  /* What this rule needs or does not take. */
  const linattn_input none = {NULL, 0, 0, 0};
  gates.log_decay = decays ? none : rows(log_decay, half, heads);
  REFUSED(linattn_forward_causal(state, rows(q, half, key_cols), rows(k, half, key_cols), rows(v, half, value_cols),
                                 &gates, strided),
          "log_decay");
  REFUSED(linattn_step(state, q, k, v, decays ? NULL : log_decay, corrects ? beta : NULL, again), "log_decay");
  gates.log_decay = decays ? rows(log_decay, half, heads) : none;
  gates.beta = corrects ? none : rows(beta, half, heads);
  REFUSED(linattn_forward_causal(state, rows(q, half, key_cols), rows(k, half, key_cols), rows(v, half, value_cols),
                                 &gates, strided),
          "beta");
  REFUSED(linattn_step(state, q, k, v, decays ? log_decay : NULL, corrects ? NULL : beta, again), "beta");
  linattn_state_destroy(state);
  linattn_state_destroy(copy);
}

static double loss(const char* map, const char* rule) {
  float out[tokens * value_cols];
  double sum = 0;
  reference(map, rule, out);
  for (int i = 0; i < tokens * value_cols; ++i) sum += (double)out[i] * (double)dout[i];
  return sum;
}

static void test_gradients(const char* map, const char* rule) {
  const int decays = strncmp(rule, "gated", 5) == 0, corrects = strstr(rule, "delta") != NULL;
  linattn_attention* attention = make(map, rule);
  linattn_gates gates = {{NULL, 0, 0, 0}, {NULL, 0, 0, 0}};
  linattn_gate_gradients gate_gradients = {{NULL, 0, 0, 0}, {NULL, 0, 0, 0}};
  float dq[tokens * key_cols], dk[tokens * key_cols], dv[tokens * value_cols], dg[tokens * heads], db[tokens * heads];
  if (decays) gates.log_decay = rows(log_decay, tokens, heads);
  if (corrects) gates.beta = rows(beta, tokens, heads);
  if (decays) gate_gradients.log_decay = to(dg, tokens, heads);
  if (corrects) gate_gradients.beta = to(db, tokens, heads);
  CHECK(linattn_vjp_causal(attention, rows(q, tokens, key_cols), rows(k, tokens, key_cols), rows(v, tokens, value_cols),
                           &gates, rows(dout, tokens, value_cols), to(dq, tokens, key_cols), to(dk, tokens, key_cols),
                           to(dv, tokens, value_cols), &gate_gradients) == LINATTN_OK);
  float* const inputs[] = {q, k, v, log_decay, beta};
  float* const gradients[] = {dq, dk, dv, decays ? dg : NULL, corrects ? db : NULL};
  for (int n = 0; n < 5; ++n) {
    if (gradients[n] == NULL) continue;
    /* Outputs of the reference are floats: differences over 2^-5 round at 1e-5, and their curvature is of that size. */
    const float h = 0.03125f;
    const double difference_tolerance = 5e-3;
    for (int i = 1; i < 3 * heads; ++i) {
      const float before = inputs[n][i];
      inputs[n][i] = before + h;
      const double above = loss(map, rule);
      inputs[n][i] = before - h;
      const double below = loss(map, rule);
      inputs[n][i] = before;
      const double expected = (above - below) / (2 * (double)h);
      CHECK(fabs((double)gradients[n][i] - expected) <= difference_tolerance * (1 + fabs(expected)));
    }
  }
  linattn_attention_destroy(attention);
}

static void test_non_causal(void) {
  linattn_attention* attention = make(NULL, NULL);
  float out[3 * value_cols], expected[value_cols], causal[tokens * value_cols];
  /* The last row of the causal form sees everything, too. */
  reference("elu_plus_one", "additive", causal);
  memcpy(expected, causal + (tokens - 1) * value_cols, sizeof expected);
  CHECK(linattn_forward(attention, rows(q + (tokens - 3) * key_cols, 3, key_cols), rows(k, tokens, key_cols),
                        rows(v, tokens, value_cols), to(out, 3, value_cols)) == LINATTN_OK);
  CHECK(close_to(out + 2 * value_cols, expected, value_cols));
  linattn_attention_destroy(attention);
}

static void test_refusals(void) {
  linattn_options options = {NULL, NULL, 4, 0, 0, 0};
  linattn_attention* attention = NULL;
  linattn_state *state = NULL, *copy = NULL;
  float out[tokens * key_cols], big[tokens * key_cols];

  options.feature_map = "softmax";
  REFUSED(linattn_attention_create(&options, &attention), "no feature map 'softmax' with rule 'additive'; built are");
  options.feature_map = "relu";
  options.rule = "delta";
  REFUSED(linattn_attention_create(&options, &attention), "no feature map 'relu' with rule 'delta'");
  options.rule = NULL;
  options.head_dim = 0;
  REFUSED(linattn_attention_create(&options, &attention), "head_dim");
  options.head_dim = -4;
  REFUSED(linattn_attention_create(&options, &attention), "head_dim");
  options.head_dim = 4;
  options.query_scale = NAN;
  REFUSED(linattn_attention_create(&options, &attention), "query_scale");
  options.query_scale = 0;
  REFUSED(linattn_attention_create(NULL, &attention), "options is NULL");
  REFUSED(linattn_attention_create(&options, NULL), "is NULL");
  CHECK(attention == NULL);
  options.heads = INT64_MAX / 4;
  REFUSED(linattn_attention_create(&options, &attention), "beyond the address space");
  options.heads = (int64_t)1 << 44; /* within it, but of no machine */
  CHECK(linattn_attention_create(&options, &attention) == LINATTN_OK);
  CHECK(linattn_state_create(attention, &state) == LINATTN_OUT_OF_MEMORY && state == NULL);
  linattn_attention_destroy(attention);
  options.heads = 0;

  CHECK(linattn_attention_create(&options, &attention) == LINATTN_OK);
  REFUSED(linattn_state_create(attention, NULL), "is NULL");
  REFUSED(linattn_state_create(NULL, &state), "the attention is NULL");
  CHECK(linattn_state_create(attention, &state) == LINATTN_OK);
  REFUSED(linattn_state_copy(NULL, &copy), "the state is NULL");
  REFUSED(linattn_state_copy(state, NULL), "is NULL");
  REFUSED(linattn_state_reset(NULL), "the state is NULL");
  REFUSED(linattn_state_save(state, NULL, 9), "the memory for the record is NULL");
  REFUSED(linattn_state_save(NULL, out, 9), "the state is NULL");
  REFUSED(linattn_state_load(state, NULL, 9), "the record is NULL");
  REFUSED(linattn_state_load(NULL, out, 9), "the state is NULL");
  CHECK(linattn_state_tokens(NULL) == -1 && linattn_state_saved_bytes(NULL) == 0);

  const linattn_input x = rows(q, 5, 4), null = rows(NULL, 5, 4);
  REFUSED(linattn_forward_causal(NULL, x, x, x, NULL, to(out, 5, 4)), "the state is NULL");
  REFUSED(linattn_forward_causal(state, null, x, x, NULL, to(out, 5, 4)), "a null pointer cannot hold (5, 4)");
  REFUSED(linattn_forward_causal(state, x, rows(k, 4, 4), x, NULL, to(out, 5, 4)),
          "linattn::forward_causal: k is (4, 4)");
  REFUSED(linattn_forward_causal(state, x, x, x, NULL, to(out, 5, 3)), "linattn::forward_causal: out is (5, 3)");
  REFUSED(linattn_forward_causal(state, rows(q, -5, 4), x, x, NULL, to(out, 5, 4)), "a size is negative");
  linattn_input endless = rows(q, INT64_MAX / 4, 4);
  REFUSED(linattn_forward_causal(state, endless, x, x, NULL, to(out, 5, 4)), "no memory holds");
  linattn_output overlapping = to(out, 5, 4);
  overlapping.row_stride = 3;
  REFUSED(linattn_forward_causal(state, x, x, x, NULL, overlapping), "rows of an output overlap");
  memcpy(big, q, sizeof big);
  REFUSED(linattn_forward_causal(state, rows(big, 5, 4), x, x, NULL, to(big + 2, 5, 4)), "an output overlaps an input");
  CHECK(memcmp(big, q, sizeof big) == 0 && linattn_state_tokens(state) == 0);
  REFUSED(linattn_forward(NULL, x, x, x, to(out, 5, 4)), "the attention is NULL");
  REFUSED(linattn_forward(attention, x, x, rows(v, 4, 4), to(out, 5, 4)), "linattn::forward: v is (4, 4)");
  REFUSED(linattn_vjp_causal(NULL, x, x, x, NULL, x, to(out, 5, 4), to(out, 5, 4), to(out, 5, 4), NULL), "is NULL");
  REFUSED(linattn_vjp_causal(attention, x, x, x, NULL, x, to(out, 5, 4), to(out, 5, 4), to(out + 40, 5, 4), NULL),
          "overlaps an input or another output");
  REFUSED(linattn_vjp_causal(attention, x, x, x, NULL, rows(dout, 5, 3), to(out, 5, 4), to(out + 20, 5, 4),
                             to(out + 40, 5, 4), NULL),
          "dout is (5, 3)");
  REFUSED(linattn_step(NULL, q, k, v, NULL, NULL, out), "the state is NULL");
  REFUSED(linattn_step(state, NULL, k, v, NULL, NULL, out), "q is NULL");
  REFUSED(linattn_step(state, q, NULL, v, NULL, NULL, out), "k is NULL");
  REFUSED(linattn_step(state, q, k, NULL, NULL, NULL, out), "v is NULL");
  REFUSED(linattn_step(state, q, k, v, NULL, NULL, NULL), "out is NULL");
  REFUSED(linattn_step(state, q, k, v, NULL, NULL, k + 3), "an output overlaps an input");
  CHECK(linattn_state_tokens(state) == 0);
  linattn_state_destroy(state);
  linattn_attention_destroy(attention);

  attention = make("identity", "delta");
  REFUSED(linattn_forward(attention, x, x, x, to(out, 5, 4)), "only the additive rule has a non-causal form");
  linattn_attention_destroy(attention);
  linattn_attention_destroy(NULL);
  linattn_state_destroy(NULL);
}

int main(void) {
  static const char* const pairs[][2] = {{"elu_plus_one", "additive"}, {"relu", "additive"},
                                         {"identity", "additive"},     {"identity", "gated"},
                                         {"identity", "delta"},        {"identity", "gated_delta"}};
  CHECK(linattn_last_error()[0] == '\0');
  CHECK(strcmp(linattn_version(), LINATTN_EXPECTED_VERSION) == 0);
  fill(q, tokens * key_cols, 1);
  fill(k, tokens * key_cols, 2);
  fill(v, tokens * value_cols, 3);
  fill(dout, tokens * value_cols, 4);
  fill(log_decay, tokens * heads, 5);
  fill(beta, tokens * heads, 6);
  for (int i = 0; i < tokens * heads; ++i) {
    log_decay[i] = -fabsf(log_decay[i]);
    beta[i] = fabsf(beta[i]);
  }
  for (int i = 0; i < tokens * key_cols; ++i) k[i] *= 0.5f; /* short keys, which the delta rules need */
  for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; ++i) {
    test_values(pairs[i][0], pairs[i][1]);
    /* relu has kinks, over which differences say nothing */
    if (strcmp(pairs[i][0], "relu") != 0) test_gradients(pairs[i][0], pairs[i][1]);
  }
  test_non_causal();
  test_refusals();
  if (failures == 0) puts("all as expected");
  return failures == 0 ? 0 : 1;
}
