//! Layers whose older blocks are coded into a smaller format: what a step's report says of it, and
//! where such rows lie.

use kvrt::{Format, Layer, Model, Pool, Status, Storage, TableBuffers};

use crate::common::*;

fn pool_of(layer: Layer) -> kvrt::Result<Pool> {
    Pool::create(&config(), &Model::new([layer]))
}

fn demoting() -> Layer {
    SHAPE.layer().demoted_key_format(Format::Int8Token).demote_after(20)
}

#[test]
fn blocks_of_old_tokens_are_demoted_at_a_steps_end() {
    let _session = Session::new();
    let pool = pool_of(demoting()).unwrap();
    let sequence = sequence(&pool);
    let text = Text::new(SHAPE, 1, 71, 801);
    let step = pool.begin_step().unwrap();
    step.append(sequence, 70, None).unwrap();
    step.reserve().unwrap();
    text.pass(&step, 0..70);
    let report = step.end().unwrap();
    // 50 tokens are old, in 3 full blocks. A row of 32 channels of f16 is 64 bytes, with codes of a
    // byte and a scale 36.
    assert_eq!((report.demoted_blocks, report.demoted_bytes), (3, 3 * 16 * 2 * 2 * (64 - 36)));
    let out = &text.run(&pool, sequence, 70..71)[0];
    text.assert_outputs(0, 70..71, out, 0.02, &Rule::default(), causal);

    let mut step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    step.reserve().unwrap();
    let (mut table, mut sealed) = ([0; 5], [9; 1]);
    let mut buffers = TableBuffers {
        block_table: Some(&mut table),
        block_table_stride: 5,
        sealed_blocks: Some(&mut sealed),
        ..Default::default()
    };
    let tables = step.export(0, &mut buffers).unwrap();
    assert_eq!(**tables.buffers().sealed_blocks.as_ref().unwrap(), [3]);
    let layout = tables.sealed();
    assert_eq!((tables.key_format(), tables.value_format()), (Format::F16, Format::F16));
    assert_eq!((layout.key_format, layout.value_format), (Format::Int8Token, Format::Int8Token));
    assert_eq!((layout.key_words, layout.key_word_bytes), (9, 4));
    assert_eq!((layout.value_words, layout.value_word_bytes), (9, 4));
    assert!(tables.sealed_key_scales().is_null() && tables.sealed_value_scales().is_null());
    let lengths = [0, 2, 3].map(|block| tables.block(0, block).unwrap().len());
    assert_eq!(lengths, [layout.block_bytes, layout.block_bytes, tables.block_bytes()]);
    // Token 21 is the sixth of the second block.
    let block = tables.block(0, 1).unwrap();
    for (strides, offset, row) in [
        (layout.key_strides, layout.key_offset, text.keys(0, 21..22)),
        (layout.value_strides, layout.value_offset, text.values(0, 21..22)),
    ] {
        let record: Vec<u8> = (0..9)
            .flat_map(|word| {
                let at = offset + 4 * (5 * strides.slot + strides.head + word * strides.dim);
                block[at as usize..at as usize + 4].to_vec()
            })
            .collect();
        let step = f32::from_le_bytes(record[32..].try_into().unwrap());
        for (code, exact) in record.iter().zip(&row[32..]) {
            let found = f32::from(*code as i8) * step;
            assert!((found - exact).abs() <= 0.51 * step + 1e-3, "{found} and {exact}");
        }
    }
}

#[test]
fn demoted_formats_have_storages_of_their_own() {
    let _session = Session::new();
    let layer = SHAPE
        .layer()
        .demoted_key_format(Format::Fp8E4m3)
        .demoted_value_format(Format::Int4Token)
        .demoted_key_storage(Storage::new().scales([0.5, 0.25]))
        .demoted_value_storage(Storage::new().rotate(true))
        .demote_after(1000);
    let pool = pool_of(layer).unwrap();
    let sequence = sequence(&pool);
    // All are among the newest.
    let step = pool.begin_step().unwrap();
    step.append(sequence, 70, None).unwrap();
    step.reserve().unwrap();
    Text::new(SHAPE, 1, 70, 802).pass(&step, 0..70);
    assert_eq!(step.end().unwrap().demoted_blocks, 0);
    let mut step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    step.reserve().unwrap();
    let mut buffers = TableBuffers::default();
    let tables = step.export(0, &mut buffers).unwrap();
    let layout = tables.sealed();
    assert_eq!((layout.key_format, layout.value_format), (Format::Fp8E4m3, Format::Int4Token));
    assert_eq!((layout.key_words, layout.value_words), (8, 5));
    assert!(tables.key_scales().is_null() && tables.sealed_value_scales().is_null());
    // SAFETY: a scale for each of the layer's two KV heads, which live as long as the pool.
    let scales = unsafe { std::slice::from_raw_parts(tables.sealed_key_scales(), 2) };
    assert_eq!(scales, [0.5, 0.25]);
}

#[test]
fn what_cannot_be_demoted_is_refused() {
    let _session = Session::new();
    for (layer, status, words) in [
        (SHAPE.layer().demote_after(20), Status::INVALID, "without demoted_key_format"),
        (
            SHAPE.layer().demoted_value_format(Format::Q4_0),
            Status::INVALID,
            "demoted_value_format without demoted_key_format",
        ),
        (
            SHAPE.layer().demoted_value_storage(Storage::new()),
            Status::INVALID,
            "demoted_value_storage without demoted_key_format",
        ),
        (demoting().demote_after((1 << 30) + 1), Status::INVALID, "demote_after is 1073741825"),
        (demoting().key_format(Format::Q8_0), Status::UNSUPPORTED, "key_format q8_0"),
        (
            demoting().demoted_key_format(Format::Kivi4),
            Status::UNSUPPORTED,
            "demoted_key_format is kivi4",
        ),
        (demoting().demoted_key_format(Format::F16), Status::INVALID, "save nothing"),
        (
            demoting().demoted_key_format(Format::Fp8E5m2),
            Status::INVALID,
            "demoted_key_storage: fp8_e5m2 needs static scales",
        ),
    ] {
        assert_error(pool_of(layer), status, words);
    }
}
