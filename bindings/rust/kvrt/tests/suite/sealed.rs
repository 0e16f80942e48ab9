//! Formats whose rows share numbers over a block: sealed blocks and the raw ones behind them, what
//! attention still knows, rows that are coded again.

use kvrt::{Format, Layer, Model, Policy, Pool, Scorer, Status, TableBuffers};

use crate::common::*;

const BLOCK: u32 = 64;

fn pool_of(layer: Layer, block_tokens: u32) -> kvrt::Result<Pool> {
    Pool::create(&config().block_tokens(block_tokens), &Model::new([layer]))
}

fn kivi4() -> Pool {
    pool_of(SHAPE.layer().key_format(Format::Kivi4), BLOCK).unwrap()
}

#[test]
fn attention_over_coded_blocks_is_near_the_softmax() {
    let _session = Session::new();
    let text = Text::new(SHAPE, 1, 150, 301);
    // Half a step of 4 bits over [-1, 1] is 1 / 15, of 2 bits 1 / 3; a query's first tokens are
    // averaged with few others.
    for (keys, values, tolerance) in [
        (Format::Kivi4, Format::Kivi4, 0.2),
        (Format::Kvarn4, Format::Kvarn4, 0.2),
        (Format::Turbo4, Format::Turbo4, 0.25),
        (Format::Kivi4, Format::F16, 0.1),
        (Format::Kivi2, Format::Kivi2, 0.6),
        (Format::Kvarn2, Format::Kvarn2, 0.6),
        (Format::Turbo3, Format::Turbo3, 0.5),
    ] {
        let layer = SHAPE.layer().key_format(keys).value_format(values);
        let pool = pool_of(layer, BLOCK).unwrap();
        let sequence = sequence(&pool);
        let mut worst = 0.0;
        for tokens in [0..70, 70..71, 71..150] {
            let out = &text.run(&pool, sequence, tokens.clone())[0];
            text.assert_outputs(0, tokens.clone(), out, tolerance, &Rule::default(), causal);
            let (exact, _) = text.formula(0, tokens.end - 1, 3, &causal(tokens.end - 1), &RULE);
            for (found, exact) in out[out.len() - 32..].iter().zip(exact) {
                worst = f64::max(worst, (f64::from(*found) - exact).abs());
            }
        }
        assert!(worst > 1e-3, "{keys:?}: off by {worst}, so that this was not stored in few bits");
        pool.check().unwrap();
    }
}

const RULE: Rule = Rule { scale: None, softcap: 0.0, slopes: Vec::new(), sinks: Vec::new() };

#[test]
fn full_blocks_are_sealed_and_the_others_raw() {
    let _session = Session::new();
    let pool = kivi4();
    let (long, short) = (sequence(&pool), sequence(&pool));
    let text = Text::new(SHAPE, 1, 80, 302);
    text.run(&pool, long, 0..70);
    text.run(&pool, short, 0..10);
    let mut step = pool.begin_step().unwrap();
    step.append(long, 1, None).unwrap();
    step.append(short, 1, None).unwrap();
    step.reserve().unwrap();
    let (mut table, mut sealed) = ([0; 4], [9; 3]);
    let mut buffers = TableBuffers {
        block_table: Some(&mut table),
        block_table_stride: 2,
        sealed_blocks: Some(&mut sealed),
        ..Default::default()
    };
    let tables = step.export(0, &mut buffers).unwrap();
    assert_eq!(**tables.buffers().sealed_blocks.as_ref().unwrap(), [1, 0, 9]);
    // Rows of 32 channels. Keys of a head, sealed: 4 bits, and 2 x 2 bytes for each channel of 32
    // tokens. Values: 16 + 4 bytes a row, also when they are raw. Raw keys: f16.
    let layout = tables.sealed();
    assert_eq!((layout.key_format, layout.value_format), (Format::Kivi4, Format::Kivi4));
    assert_eq!((tables.key_format(), tables.value_format()), (Format::F16, Format::Kivi4));
    let (key_tile, value_rows) = (64 * 16 + 2 * 32 * 4, 64 * 20);
    assert_eq!(layout.block_bytes, 2 * (key_tile + value_rows));
    // In this layout a head's values lie behind its keys.
    assert_eq!(layout.value_offset - layout.key_offset, key_tile as i64);
    assert_eq!(layout.key_head_bytes, (key_tile + value_rows) as i64);
    assert_eq!(layout.value_head_bytes, layout.key_head_bytes);
    assert_eq!(tables.block_bytes(), 64 * 2 * (64 + 20));
    let lengths = [(0, 0), (0, 1), (1, 0)].map(|(i, b)| tables.block(i, b).unwrap().len());
    assert_eq!(lengths, [layout.block_bytes, tables.block_bytes(), tables.block_bytes()]);
    // Token 65 is the second of the raw block.
    let (block, strides) = (tables.block(0, 1).unwrap(), tables.key_strides());
    for (dim, key) in text.keys(0, 65..66)[32..].iter().enumerate() {
        let word = strides.slot + strides.head + dim as i64 * strides.dim;
        let at = (tables.key_offset() + 2 * word) as usize;
        assert_eq!(f16_value(u16::from_le_bytes([block[at], block[at + 1]])), *key);
    }

    // Which blocks are sealed must be known before their bytes can be lent.
    let mut table = [0; 4];
    let mut buffers =
        TableBuffers { block_table: Some(&mut table), block_table_stride: 2, ..Default::default() };
    let tables = step.export(0, &mut buffers).unwrap();
    assert_error(tables.block(0, 1), Status::INVALID, "sealed_blocks");
    let mut small = [9; 1];
    let mut buffers = TableBuffers { sealed_blocks: Some(&mut small), ..Default::default() };
    assert_error(step.export(0, &mut buffers), Status::LIMIT, "item_capacity holds 1");
    assert_eq!(small, [9]);
}

#[test]
fn nothing_is_sealed_in_other_layers() {
    let _session = Session::new();
    let pool = pool_of(SHAPE.layer().key_format(Format::Q8_0), BLOCK).unwrap();
    let sequence = sequence(&pool);
    Text::new(SHAPE, 1, 70, 303).run(&pool, sequence, 0..70);
    let mut step = pool.begin_step().unwrap();
    step.append(sequence, 1, None).unwrap();
    step.reserve().unwrap();
    let mut sealed = [9];
    let mut buffers = TableBuffers { sealed_blocks: Some(&mut sealed), ..Default::default() };
    let tables = step.export(0, &mut buffers).unwrap();
    let layout = tables.sealed();
    assert_eq!((layout.key_format, layout.value_format), (Format::Q8_0, Format::Q8_0));
    assert_eq!(layout.block_bytes, tables.block_bytes());
    assert_eq!(sealed, [0]);
}

#[test]
fn rows_that_leave_a_block_are_counted() {
    let _session = Session::new();
    let pool = kivi4();
    let sequence = sequence(&pool);
    Text::new(SHAPE, 1, 200, 304).run(&pool, sequence, 0..200);
    let before = pool.counters().layer(0).unwrap();
    assert_eq!((before.recoded_rows, before.recoding_error), (0, 0.0));
    // Kept are 0 to 3 and 134 to 199. Three blocks were sealed, of 192 tokens: 4 + 58 survivors
    // leave one, and their keys go into another, which the first 64 survivors fill.
    let policy = Policy::new(Scorer::Streaming, 70).sinks(4).recent(66);
    let report = pool.compress(sequence, Some(&policy)).unwrap();
    assert_eq!((report.tokens_before, report.tokens_after), (2 * 200, 2 * 70));
    assert_eq!(report.recoded_rows, 2 * 62);
    assert!(report.recoding_error > 1e-4 && report.recoding_error < 0.2, "{report:?}");
    let after = pool.counters().layer(0).unwrap();
    assert_eq!(after.recoded_rows, report.recoded_rows);
    assert!((after.recoding_error - report.recoding_error).abs() < 1e-12);
    pool.check().unwrap();
}

#[test]
fn blocks_must_hold_whole_groups_of_tokens() {
    let _session = Session::new();
    for (format, multiple) in
        [(Format::Kivi4, 32), (Format::Kivi2, 32), (Format::Kvarn4, 64), (Format::Kvarn2, 64)]
    {
        for block_tokens in [16, 32, 64, 128] {
            let pool = pool_of(SHAPE.layer().key_format(format), block_tokens);
            if block_tokens % multiple == 0 {
                pool.unwrap();
            } else {
                assert_error(pool, Status::UNSUPPORTED, &format!("block_tokens is {block_tokens}"));
            }
        }
    }
}

#[test]
fn identities_tell_what_bytes_depend_on() {
    let _session = Session::new();
    let identities = |keys, values| {
        let layer = SHAPE.layer().key_format(keys).value_format(values);
        let pool = pool_of(layer, BLOCK).unwrap();
        let mut step = pool.begin_step().unwrap();
        step.append(sequence(&pool), 1, None).unwrap();
        step.reserve().unwrap();
        let mut buffers = TableBuffers::default();
        let tables = step.export(0, &mut buffers).unwrap();
        (tables.key_identity(), tables.value_identity())
    };
    let one = identities(Format::Kivi4, Format::Q8_0);
    assert_eq!(identities(Format::Kivi4, Format::Q8_0), one);
    let other = identities(Format::Kivi2, Format::Q8_0);
    assert!(other.0 != one.0 && other.1 == one.1);
    let other = identities(Format::Kivi4, Format::Q4_0);
    assert!(other.0 == one.0 && other.1 != one.1);
}
