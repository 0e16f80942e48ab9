//! Formats of codes and scales: attention near the formula, sizes, records as llama.cpp has them,
//! static scales and what exceeds them.

use kvrt::{Format, Layer, Layout, Model, Pool, Preset, Status, Storage, TableBuffers};

use crate::common::*;

const TOKENS: usize = 40;

fn create_one(layer: Layer) -> kvrt::Result<Pool> {
    Pool::create(&config(), &Model::new([layer]))
}

#[test]
fn attention_over_codes_is_near_the_softmax() {
    let _session = Session::new();
    let text = Text::new(SHAPE, 1, TOKENS, 201);
    // A head's first token is its value alone, off by half a step of its scale: 1 / 254 for 8 bits;
    // an eighth, at the far end of the codes, for q4_0. Keys shift weights besides.
    let tolerances = [(Format::Int8Token, 0.01), (Format::Q8_0, 0.01), (Format::Q4_0, 0.2)];
    for (key_format, key_tolerance) in tolerances {
        for (value_format, value_tolerance) in tolerances {
            for rotated in [false, true] {
                let storage = Storage::new().rotate(rotated);
                let layer = SHAPE
                    .layer()
                    .key_format(key_format)
                    .value_format(value_format)
                    .key_storage(storage.clone())
                    .value_storage(storage);
                let pool = create_one(layer).unwrap();
                let sequence = sequence(&pool);
                for tokens in [0..21, 21..22, 22..TOKENS] {
                    let outputs = text.run(&pool, sequence, tokens.clone());
                    let tolerance = f64::max(key_tolerance, value_tolerance);
                    let rule = Rule::default();
                    text.assert_outputs(0, tokens, &outputs[0], tolerance, &rule, causal);
                }
                pool.check().unwrap();
            }
        }
    }
}

#[test]
fn a_token_takes_the_bytes_of_its_format() {
    let _session = Session::new();
    // Of a row of 64 channels: codes, scales, filled up to words of 4 bytes.
    for (format, bytes) in [
        (Format::F32, 256),
        (Format::F16, 128),
        (Format::Fp8E4m3, 64),
        (Format::Fp8E5m2, 64),
        (Format::Fp8Token, 64 + 4),
        (Format::Int8Token, 64 + 4),
        (Format::Int4Token, 32 + 4),
        (Format::Q8_0, 2 * (32 + 2)),
        (Format::Q4_0, 2 * (16 + 2)),
        (Format::Q4_1, 2 * (16 + 4)),
        (Format::Nvfp4, 32 + 4),
        (Format::Mxfp4, 32 + 4),
    ] {
        assert!(kvrt::capabilities().unwrap().has_format(format), "{format:?}");
        let one = || Storage::new().scale_one(true);
        let layer = Layer::new(4, 2, 64).key_format(format).value_format(Format::F16);
        let model = Model::new([layer.key_storage(one())]);
        let plan = kvrt::plan(&config(), &model, 1, 16).unwrap();
        assert_eq!(plan.bytes_per_token, 2 * (bytes + 128), "{format:?}");
        let layer = Layer::new(4, 2, 64).key_format(Format::F16).value_format(format);
        let model = Model::new([layer.value_storage(one())]);
        let plan = kvrt::plan(&config(), &model, 1, 16).unwrap();
        assert_eq!(plan.bytes_per_token, 2 * (bytes + 128), "{format:?}");
    }
}

#[test]
fn presets_spare_short_windows_and_the_ends() {
    let _session = Session::new();
    // Keys and values of 2 heads with 64 channels: f16 256 each, int8 2 * 68, int4 2 * 36.
    const F16: u64 = 512;
    let mut layers = vec![Layer::new(4, 2, 64); 8];
    layers[0] = layers[0].clone().key_format(Format::F32);
    layers[3] = layers[3].clone().window(1024);
    layers[4] = layers[4].clone().key_storage(Storage::new().scales([0.5]));
    layers[7] = layers[7].clone().shares_cache_of(4);
    for (preset, bytes, ends) in [
        (Preset::NearLossless, 272, false),
        (Preset::Balanced, 208, true),
        (Preset::Smallest, 144, true),
    ] {
        let model = Model::new(layers.clone()).with_preset(preset).unwrap();
        for layer in 0..8 {
            let plan = kvrt::plan_of_layer(&config(), &model, 1, 16, layer).unwrap();
            let expected = match layer {
                7 => 0,
                3 => F16,
                0 if ends => 2 * F16,
                1 | 5 | 6 if ends => F16,
                _ => bytes,
            };
            assert_eq!(plan.layer_bytes_per_block, 16 * expected, "{preset:?}, layer {layer}");
        }
        Pool::create(&config(), &model).unwrap();
    }
    let outcome = Model::new(layers).with_preset(Preset::from(9));
    assert_error(outcome, Status::UNSUPPORTED, "preset 9");
    assert_error(Model::new([]).with_preset(Preset::Balanced), Status::INVALID, "layer_count");
}

#[test]
fn a_preset_is_the_same_layers_written_by_hand() {
    let _session = Session::new();
    let text = Text::new(SHAPE, 1, TOKENS, 203);
    let outputs = |model: &Model| {
        let pool = Pool::create(&config(), model).unwrap();
        let sequence = sequence(&pool);
        text.run(&pool, sequence, 0..TOKENS)
    };
    let by_hand = |rotate| {
        let storage = Storage::new().rotate(rotate);
        let layer = SHAPE.layer().key_format(Format::Int8Token).key_storage(storage.clone());
        Model::new([layer.value_format(Format::Int8Token).value_storage(storage)])
    };
    let preset = Model::new([SHAPE.layer()]).with_preset(Preset::NearLossless).unwrap();
    assert!(outputs(&preset) == outputs(&by_hand(true)));
    assert!(outputs(&preset) != outputs(&by_hand(false)));
}

#[test]
fn words_of_exported_blocks_are_records() {
    let _session = Session::new();
    for layout in [Layout::Hnd, Layout::Nhd] {
        let layer = SHAPE.layer().key_format(Format::Q8_0).value_format(Format::F16);
        let pool = Pool::create(&config().layout(layout), &Model::new([layer])).unwrap();
        let sequence = sequence(&pool);
        let text = Text::new(SHAPE, 1, 20, 202);
        text.run(&pool, sequence, 0..19);
        let mut step = pool.begin_step().unwrap();
        step.append(sequence, 1, None).unwrap();
        step.reserve().unwrap();
        let mut table = [0; 2];
        let mut buffers = TableBuffers {
            block_table: Some(&mut table),
            block_table_stride: 2,
            ..Default::default()
        };
        let tables = step.export(0, &mut buffers).unwrap();
        assert_eq!((tables.key_format(), tables.value_format()), (Format::Q8_0, Format::F16));
        assert_eq!((tables.key_words(), tables.key_word_bytes()), (17, 2));
        assert_eq!((tables.value_words(), tables.value_word_bytes()), (32, 2));
        let (group, strides) = (i64::from(tables.slot_group()), tables.key_strides());
        for token in 0..19 {
            let block = tables.block(0, token / 16).unwrap();
            for head in 0..2 {
                // A scale in f16 and 32 signed codes, the largest of them 127.
                let slot = (token % 16) as i64;
                let record: Vec<u8> = (0..17)
                    .flat_map(|word| {
                        let index = slot / group * strides.group
                            + slot % group * strides.slot
                            + head as i64 * strides.head
                            + word * strides.dim;
                        let start = (tables.key_offset() + 2 * index) as usize;
                        block[start..start + 2].to_vec()
                    })
                    .collect();
                let scale = f16_value(u16::from_le_bytes([record[0], record[1]]));
                let row = &text.keys[0][(token * 2 + head) * 32..][..32];
                let largest = row.iter().fold(0.0, |largest: f32, x| largest.max(x.abs()));
                assert!((scale * 127.0 - largest).abs() <= largest / 1024.0);
                for (code, key) in record[2..34].iter().zip(row) {
                    let found = f32::from(*code as i8) * scale;
                    assert!((found - key).abs() <= 0.6 * scale, "token {token}: {found}, {key}");
                }
            }
        }
    }
}

#[test]
fn what_exceeds_a_static_scale_is_counted() {
    let _session = Session::new();
    let layer = SHAPE
        .layer()
        .key_format(Format::Fp8E4m3)
        .key_storage(Storage::new().scale_one(true))
        .value_storage(Storage::new().scales([0.5, 0.25]));
    let model = Model::new([layer, SHAPE.layer().shares_cache_of(0), SHAPE.layer()]);
    let pool = Pool::create(&config(), &model).unwrap();
    let sequence = sequence(&pool);
    assert_eq!(pool.counters().layer(0).unwrap().saturated_values, [0, 0]);

    // 300 is beyond 448 / 2 and 448 / 4, and within 448.
    let keys: Vec<f32> = (0..64).map(|i| if i == 40 { -500.0 } else { 1.0 }).collect();
    let values: Vec<f32> = (0..64).map(|i| if i % 10 == 1 { 300.0 } else { 64.0 }).collect();
    let mut step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    step.reserve().unwrap();
    for layer in [0, 2] {
        step.write(layer, &dense(&keys, 1, 2), &dense(&values, 1, 2)).unwrap();
    }
    let mut out = vec![0.0; SHAPE.out_row()];
    step.attend(0, &dense(&[1.0; 128], 1, 4), &mut dense_mut(&mut out, 1, 4)).unwrap();
    let mut buffers = TableBuffers::default();
    let tables = step.export(0, &mut buffers).unwrap();
    assert_eq!((tables.key_words(), tables.key_word_bytes()), (8, 4));
    // SAFETY: a scale for each of the layer's two KV heads, which live as long as the pool.
    let scales = |pointer| unsafe { std::slice::from_raw_parts(pointer, 2) };
    assert_eq!(scales(tables.key_scales()), [1.0, 1.0]);
    assert_eq!(scales(tables.value_scales()), [0.5, 0.25]);
    step.end().unwrap();

    // One token: the output is its value as it is stored, for two query heads each.
    for (i, found) in out.iter().enumerate() {
        let (head, value) = (i / 64, values[i / 64 * 32 + i % 32]);
        assert_eq!(*found, value.min([224.0, 112.0][head]), "{i}");
    }
    let stats = pool.counters().layer(0).unwrap();
    assert_eq!(
        (stats.saturated_keys.as_slice(), stats.saturated_values.as_slice()),
        ([0, 1].as_slice(), [4, 3].as_slice())
    );
    assert_eq!(pool.counters().layer(1).unwrap(), stats, "the owner's");
    assert_eq!(pool.counters().layer(2).unwrap().saturated_values, [0, 0]);
    assert_error(pool.counters().layer(3), Status::INVALID, "layer 3 of a model of 3");
}

#[test]
fn storage_must_fit_the_format() {
    let _session = Session::new();
    let fp8 = || SHAPE.layer().key_format(Format::Fp8E4m3).value_format(Format::F16);
    let refused = |layer, words| assert_error(create_one(layer), Status::INVALID, words);
    refused(fp8(), "key_storage: fp8_e4m3 needs static scales; say KV_STORAGE_SCALE_ONE");
    refused(fp8().key_storage(Storage::new().scale_one(true).scale_one(false)), "needs static");
    refused(
        SHAPE.layer().value_format(Format::Fp8E5m2),
        "value_storage: fp8_e5m2 needs static scales",
    );
    let scales = |values: Vec<f32>| fp8().key_storage(Storage::new().scales(values));
    refused(scales(vec![]), "scales and scale_count come together");
    refused(scales(vec![1.0; 3]), "scale_count is 3: 1, or one for each of 2 KV heads");
    for value in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        refused(scales(vec![1.0, value]), "scales[1]");
    }
    let both = Storage::new().scales([1.0]).scale_one(true);
    refused(fp8().key_storage(both), "KV_STORAGE_SCALE_ONE that says there are none");
    let rotated = SHAPE.layer().key_storage(Storage::new().rotate(true));
    assert_error(create_one(rotated), Status::UNSUPPORTED, "f16 is not stored rotated");
    create_one(scales(vec![2.0])).unwrap();
}
