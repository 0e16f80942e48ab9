//! Attention against the formula: element types, formats, strides, and what a layer may add.

use kvrt::{
    AttendOptions, Elements, ElementsMut, Format, Layout, Model, Pool, Sequence, Strides, Tensor,
    TensorMut,
};

use crate::common::*;

const TOKENS: usize = 40;
/// Prompt tokens of the first step, in the middle of a block.
const PROMPT: usize = 21;

/// One step of `rows` rows of one sequence; the body writes and attends.
fn step(pool: &Pool, sequence: Sequence, rows: usize, body: impl FnOnce(&kvrt::Step<'_>)) {
    let step = pool.begin_step().unwrap();
    step.append(sequence, rows as u32, None).unwrap();
    step.reserve().unwrap();
    body(&step);
    step.end().unwrap();
}

fn formats() -> [(Format, f64); 3] {
    // All numbers are exact in each; the rest is f32 arithmetic.
    [(Format::F32, 2e-6), (Format::F16, 2e-6), (Format::Bf16, 2e-6)]
}

#[test]
fn prefill_and_decode_are_the_softmax_in_every_format() {
    let _session = Session::new();
    for (format, tolerance) in formats() {
        for layout in [Layout::Native, Layout::Hnd, Layout::Nhd] {
            let model = Model::new(vec![SHAPE.layer().key_format(format); 2]);
            let pool = Pool::create(&config().layout(layout), &model).unwrap();
            let sequence = sequence(&pool);
            let text = Text::new(SHAPE, 2, TOKENS, 1);
            for tokens in [0..PROMPT, PROMPT..PROMPT + 1, PROMPT + 1..TOKENS] {
                let outputs = text.run(&pool, sequence, tokens.clone());
                for (layer, found) in outputs.iter().enumerate() {
                    let rule = Rule::default();
                    text.assert_outputs(layer, tokens.clone(), found, tolerance, &rule, causal);
                }
            }
            pool.check().unwrap();
        }
    }
}

#[test]
fn half_bits_go_in_and_out() {
    let _session = Session::new();
    let text = Text::new(SHAPE, 1, TOKENS, 2);
    type Codec = (fn(f32) -> u16, fn(u16) -> f32, bool, f64);
    let codecs: [Codec; 2] =
        [(f16_bits, f16_value, true, 1.0 / 2048.0), (bf16_bits, bf16_value, false, 1.0 / 256.0)];
    for (encode, decode, is_f16, tolerance) in codecs {
        let pool = pool(1);
        let sequence = sequence(&pool);
        let bits = |values: &[f32]| values.iter().map(|&x| encode(x)).collect::<Vec<u16>>();
        let (keys, values) = (bits(&text.keys[0]), bits(&text.values[0]));
        let queries = bits(&text.queries[0]);
        let mut out = vec![0u16; TOKENS * SHAPE.out_row()];
        let lend = |bits| if is_f16 { Elements::F16(bits) } else { Elements::Bf16(bits) };
        let tensor = |bits, heads| Tensor::dense(lend(bits), [TOKENS, heads, 32]);
        step(&pool, sequence, TOKENS, |step| {
            let lent =
                if is_f16 { ElementsMut::F16(&mut out) } else { ElementsMut::Bf16(&mut out) };
            let mut out = TensorMut::dense(lent, [TOKENS, 4, 32]);
            step.write(0, &tensor(&keys, 2), &tensor(&values, 2)).unwrap();
            step.attend(0, &tensor(&queries, 4), &mut out).unwrap();
        });
        let found: Vec<f32> = out.iter().map(|&bits| decode(bits)).collect();
        text.assert_outputs(0, 0..TOKENS, &found, tolerance, &Rule::default(), causal);
    }
}

#[test]
fn a_packed_buffer_is_used_where_it_lies() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, TOKENS, 3);
    // [queries, keys, values] of a row behind each other, rows backwards, output with gaps.
    let row = SHAPE.query_row() + SHAPE.key_row() + SHAPE.value_row();
    let mut packed = Vec::new();
    for token in (0..TOKENS).rev() {
        packed.extend_from_slice(text.queries(0, token..token + 1));
        packed.extend_from_slice(text.keys(0, token..token + 1));
        packed.extend_from_slice(text.values(0, token..token + 1));
    }
    let part = |heads, offset: usize| {
        let last_row = (TOKENS - 1) * row;
        let strides = Strides { offset: last_row + offset, row: -(row as i64), head: 32, dim: 1 };
        Tensor::strided(Elements::F32(&packed), [TOKENS, heads, 32], strides)
    };
    let (keys, values) = (part(2, SHAPE.query_row()), part(2, SHAPE.query_row() + SHAPE.key_row()));
    let gap = 5;
    let out_row = SHAPE.out_row() + gap;
    let mut out = vec![777.0f32; TOKENS * out_row];
    step(&pool, sequence, TOKENS, |step| {
        let strides = Strides { offset: 0, row: out_row as i64, head: 32, dim: 1 };
        let lent = ElementsMut::F32(&mut out);
        let mut out = TensorMut::strided(lent, [TOKENS, 4, 32], strides);
        step.write(0, &keys, &values).unwrap();
        step.attend(0, &part(4, 0), &mut out).unwrap();
    });
    let mut found = Vec::new();
    for row in out.chunks_exact(out_row) {
        found.extend_from_slice(&row[..SHAPE.out_row()]);
        assert!(row[SHAPE.out_row()..].iter().all(|&x| x == 777.0), "the gap was written");
    }
    text.assert_outputs(0, 0..TOKENS, &found, 2e-6, &Rule::default(), causal);
}

#[test]
fn transposed_and_broadcast_tensors_are_read_as_their_strides_say() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let mut text = Text::new(SHAPE, 1, 8, 4);
    // Keys dim-major; the same values for every head and row.
    let mut keys = vec![0.0; text.keys[0].len()];
    for (index, &key) in text.keys[0].iter().enumerate() {
        let (row, dim) = (index / 32, index % 32);
        keys[dim * 16 + row] = key;
    }
    let value = text.values[0][..32].to_vec();
    for row in text.values[0].chunks_exact_mut(32) {
        row.copy_from_slice(&value);
    }
    let dim_major = Strides { offset: 0, row: 2, head: 1, dim: 16 };
    let broadcast = Strides { offset: 0, row: 0, head: 0, dim: 1 };
    let mut out = vec![0.0; 8 * SHAPE.out_row()];
    step(&pool, sequence, 8, |step| {
        let keys = Tensor::strided(Elements::F32(&keys), [8, 2, 32], dim_major);
        let values = Tensor::strided(Elements::F32(&value), [8, 2, 32], broadcast);
        step.write(0, &keys, &values).unwrap();
        step.attend(0, &dense(&text.queries[0], 8, 4), &mut dense_mut(&mut out, 8, 4)).unwrap();
    });
    text.assert_outputs(0, 0..8, &out, 2e-6, &Rule::default(), causal);
}

#[test]
fn log_sum_exp_is_the_logarithm_of_the_denominator() {
    let _session = Session::new();
    let pool = pool(1);
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, TOKENS, 5);
    let mut out = vec![0.0; TOKENS * SHAPE.out_row()];
    let mut found = vec![f32::NAN; TOKENS * 4];
    step(&pool, sequence, TOKENS, |step| {
        let (keys, values) = (dense(&text.keys[0], TOKENS, 2), dense(&text.values[0], TOKENS, 2));
        let queries = dense(&text.queries[0], TOKENS, 4);
        step.write(0, &keys, &values).unwrap();
        let options = AttendOptions { log_sum_exp: Some(&mut found), ..Default::default() };
        step.attend_with(0, &queries, &mut dense_mut(&mut out, TOKENS, 4), options).unwrap();
    });
    for (index, &found) in found.iter().enumerate() {
        let (token, head) = (index / 4, index % 4);
        let (_, expected) = text.formula(0, token, head, &causal(token), &Rule::default());
        assert!((f64::from(found) - expected).abs() < 2e-6, "{found}, not {expected}");
    }
    text.assert_outputs(0, 0..TOKENS, &out, 2e-6, &Rule::default(), causal);
}

#[test]
fn layers_add_windows_sinks_caps_and_slopes() {
    let _session = Session::new();
    let shape = Shape { query_heads: 6, kv_heads: 3, key_dim: 40, value_dim: 64 };
    let slopes = [0.5f32, 0.25, 0.125, 0.5, 0.25, 0.125];
    let sinks = [0.5f32, -1.0, 2.0, 0.0, 1.0, -0.5];
    let layer = shape.layer().key_format(Format::F32).value_format(Format::F16);
    let model = Model::new([
        layer.clone().window(12).window_sinks(2),
        layer.clone().logit_softcap(2.0).softmax_scale(0.25),
        layer.clone().alibi_slopes(slopes).sink_logits(sinks),
        layer.shares_cache_of(1),
    ]);
    let pool = Pool::create(&config(), &model).unwrap();
    let sequence = sequence(&pool);
    let mut text = Text::new(shape, 4, TOKENS, 6);
    text.keys[3] = text.keys[1].clone();
    text.values[3] = text.values[1].clone();

    let step = pool.begin_step().unwrap();
    step.append(sequence, TOKENS as u32, None).unwrap();
    step.reserve().unwrap();
    let mut outputs = Vec::new();
    for layer in 0..4 {
        let keys = dense(&text.keys[layer], TOKENS, 3);
        let values = dense(&text.values[layer], TOKENS, 3);
        let queries = dense(&text.queries[layer], TOKENS, 6);
        let written = step.write(layer as u32, &keys, &values);
        assert_eq!(written.is_ok(), layer != 3, "a layer that shares a cache is not written");
        let mut out = vec![0.0; TOKENS * shape.out_row()];
        step.attend(layer as u32, &queries, &mut dense_mut(&mut out, TOKENS, 6)).unwrap();
        outputs.push(out);
    }
    step.end().unwrap();

    let window = |token: usize| (0..=token).filter(|&p| p < 2 || p + 12 > token).collect();
    let capped = Rule { scale: Some(0.25), softcap: 2.0, ..Default::default() };
    let sloped = Rule {
        slopes: slopes.map(f64::from).to_vec(),
        sinks: sinks.map(f64::from).to_vec(),
        ..Default::default()
    };
    text.assert_outputs(0, 0..TOKENS, &outputs[0], 2e-6, &Rule::default(), window);
    text.assert_outputs(1, 0..TOKENS, &outputs[1], 2e-6, &capped, causal);
    text.assert_outputs(2, 0..TOKENS, &outputs[2], 2e-6, &sloped, causal);
    text.assert_outputs(3, 0..TOKENS, &outputs[3], 2e-6, &Rule::default(), causal);
}

#[test]
fn results_have_the_same_bits_for_every_number_of_threads() {
    let _session = Session::new();
    let text = Text::new(SHAPE, 2, 200, 7);
    let run = |threads| {
        let pool: Pool = create(&config().threads(threads), 2);
        text.run(&pool, sequence(&pool), 0..200)
    };
    let alone: Vec<Vec<f32>> = run(1);
    assert!(alone == run(2) && alone == run(5));
}
