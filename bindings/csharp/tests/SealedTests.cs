// Formats whose rows share numbers over a block: sealed blocks and the raw ones behind them, what
// attention still knows, rows that are coded again.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static unsafe class SealedTests
    {
        private const uint Text = 7;

        private static Engine Blocks(
            StorageFormat keys, StorageFormat values = StorageFormat.Default, uint tokens = 64)
        {
            return new Engine(config =>
            {
                config.BlockTokens = tokens;
                config.Options = PoolOptions.Debug;
            }, layer =>
            {
                layer.KeyFormat = keys;
                layer.ValueFormat = values;
            }, layers: 1);
        }

        /// <summary>After 70 tokens one block is sealed, and read together with the raw one behind
        /// it.</summary>
        [Test]
        public static void AttentionOverSealedBlocksIsNear()
        {
            IsNear(StorageFormat.Kivi4, StorageFormat.Kivi4, 0.1);
            IsNear(StorageFormat.Kvarn4, StorageFormat.Kvarn4, 0.1);
            IsNear(StorageFormat.Turbo4, StorageFormat.Turbo4, 0.1);
            IsNear(StorageFormat.Kivi4, StorageFormat.Float16, 0.1);
            IsNear(StorageFormat.Kivi2, StorageFormat.Kivi2, 0.3);
            IsNear(StorageFormat.Kvarn2, StorageFormat.Kvarn2, 0.3);
            IsNear(StorageFormat.Turbo3, StorageFormat.Turbo3, 0.2);
        }

        private static void IsNear(StorageFormat keys, StorageFormat values, double tolerance)
        {
            using (Engine engine = Blocks(keys, values))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, Text, 70);
                using (Step step = engine.Pool.BeginStep())
                {
                    double[] actual = engine.Forward(step, sequence, Text, 1)[0]
                        .Select(value => (double)value).ToArray();
                    double[] expected = engine.Expected(Text, 70, 0);
                    Check.Close(expected, actual, tolerance, $"{keys} and {values}");
                    double worst = expected.Zip(actual, (e, a) => Math.Abs(a - e)).Max();
                    Check.True(worst > 1e-4, $"{keys}: off by {worst}, so it was not stored so");
                    step.End();
                }
                engine.Pool.Check();
            }
        }

        /// <summary>Rows of 32 channels. Sealed keys of a head: 4 bits, and 2 x 2 bytes for each
        /// channel of 32 tokens. Values: 16 + 4 bytes a row, also when they are raw. Raw keys: f16.
        /// </summary>
        [Test]
        public static void FullBlocksAreSealedAndTheOthersRaw()
        {
            const int KeyTile = 64 * 16 + 2 * 32 * 4, ValueRows = 64 * (16 + 4);
            using (Engine engine = Blocks(StorageFormat.Kivi4))
            {
                Sequence[] sequences =
                    { engine.Pool.CreateSequence(), engine.Pool.CreateSequence() };
                engine.Run(sequences[0], Text, 70);
                engine.Run(sequences[1], Text, 10);
                using (Step step = engine.Pool.BeginStep())
                {
                    step.AppendBatch(sequences, new uint[] { 1, 1 });
                    step.Reserve();
                    int[] sealedBlocks = { 9, 9, 9 }, indices = new int[3];
                    ExportedTables tables = step.Export(0, new TableBuffers
                    {
                        SealedBlocks = sealedBlocks, Indices = indices
                    });
                    Check.SameElements(new[] { 1, 0, 9 }, sealedBlocks, "sealed blocks");
                    Check.Equal(StorageFormat.Kivi4, tables.SealedKeyFormat, "sealed keys");
                    Check.Equal(StorageFormat.Kivi4, tables.SealedValueFormat, "sealed values");
                    Check.Equal(StorageFormat.Float16, tables.KeyFormat, "raw keys");
                    Check.Equal(StorageFormat.Kivi4, tables.ValueFormat, "raw values");
                    Check.Equal(2L * (KeyTile + ValueRows), tables.SealedBlockBytes, "sealed");
                    Check.Equal(2L * 64 * (64 + 16 + 4), tables.BlockBytes, "raw");
                    // In this layout a head's values lie behind its keys.
                    Check.Equal((long)KeyTile, tables.SealedValueOffset - tables.SealedKeyOffset,
                                "values of a head");
                    Check.Equal((long)KeyTile + ValueRows, tables.SealedKeyHeadBytes, "keys");
                    Check.Equal((long)KeyTile + ValueRows, tables.SealedValueHeadBytes, "values");
                    CheckRawKey(tables, indices[1], Engine.Row(0, Text, 65, 0));
                    int[] small = { 9 };
                    Check.Fails(Status.Limit, "item_capacity holds 1", () => step.Export(
                        0, new TableBuffers { SealedBlocks = small }));
                    Check.Equal(9, small[0], "nothing was written");
                }
            }
        }

        /// <summary>Token 65 is the second of the raw block.</summary>
        private static void CheckRawKey(in ExportedTables tables, int block, float[] row)
        {
            byte* keys = (byte*)tables.Base + block * tables.BlockStride + tables.KeyOffset;
            for (int i = 0; i < row.Length; ++i)
            {
                long word = tables.KeyStrideSlot + i / Engine.Dim * tables.KeyStrideHead +
                            i % Engine.Dim * tables.KeyStrideDim;
                Check.Equal(Numbers.Stored(row[i], StorageFormat.Float16),
                            Numbers.FromHalf(((ushort*)keys)[word]), $"element {i}");
            }
        }

        [Test]
        public static void NothingIsSealedInOtherLayers()
        {
            using (Engine engine = Blocks(StorageFormat.Q8_0))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, Text, 70);
                using (Step step = engine.Pool.BeginStep())
                {
                    step.Append(sequence, 1);
                    step.Reserve();
                    int[] sealedBlocks = { 9 };
                    ExportedTables tables = step.Export(
                        0, new TableBuffers { SealedBlocks = sealedBlocks });
                    Check.Equal(0, sealedBlocks[0], "sealed blocks");
                    Check.Equal(tables.BlockBytes, tables.SealedBlockBytes, "bytes of a block");
                    Check.Equal(StorageFormat.Q8_0, tables.SealedKeyFormat, "format");
                }
            }
        }

        /// <summary>Of 200 tokens 0 to 3 and 134 to 199 are kept. Three blocks were sealed, of 192
        /// tokens: 4 + 58 survivors leave one, and their keys go into another, which the first 64
        /// survivors fill.</summary>
        [Test]
        public static void RowsThatLeaveABlockAreCounted()
        {
            using (Engine engine = Blocks(StorageFormat.Kivi4))
            {
                Sequence sequence = engine.Pool.CreateSequence();
                engine.Run(sequence, Text, 200);
                Check.Equal(0UL, engine.Pool.GetLayerStats(0).RecodedRows, "before");
                CompressReport report = engine.Pool.Compress(sequence, new Policy
                {
                    Scorer = Scorer.Streaming, Budget = 70, Sinks = 4, Recent = 66
                });
                Check.Equal(2UL * 70, report.TokensAfter, "tokens");
                Check.Equal(2UL * 62, report.RecodedRows, "rows");
                Check.True(report.RecodingError > 1e-4 && report.RecodingError < 0.2,
                           $"error {report.RecodingError}");
                LayerStats stats = engine.Pool.GetLayerStats(0);
                Check.Equal(report.RecodedRows, stats.RecodedRows, "rows of the layer");
                Check.Close(new[] { report.RecodingError }, new[] { stats.RecodingError }, 1e-12,
                            "error of the layer");
                engine.Pool.Check();
            }
        }

        [Test]
        public static void BlocksHoldWholeGroupsOfTokens()
        {
            foreach (uint tokens in new uint[] { 16, 32, 64, 128 })
            {
                IsMultiple(StorageFormat.Kivi4, 32, tokens);
                IsMultiple(StorageFormat.Kivi2, 32, tokens);
                IsMultiple(StorageFormat.Kvarn4, 64, tokens);
                IsMultiple(StorageFormat.Kvarn2, 64, tokens);
            }
        }

        private static void IsMultiple(StorageFormat format, uint multiple, uint tokens)
        {
            if (tokens % multiple == 0)
            {
                Blocks(format, tokens: tokens).Dispose();
            }
            else
            {
                Check.Fails(Status.Unsupported, $"block_tokens is {tokens}",
                            () => Blocks(format, tokens: tokens).Dispose());
            }
        }

        [Test]
        public static void IdentitiesTellWhatBytesDependOn()
        {
            ulong[] one = Identities(StorageFormat.Kivi4, StorageFormat.Q8_0);
            Check.SameElements(one, Identities(StorageFormat.Kivi4, StorageFormat.Q8_0), "same");
            ulong[] other = Identities(StorageFormat.Kivi2, StorageFormat.Q8_0);
            Check.True(other[0] != one[0] && other[1] == one[1], "other keys");
            other = Identities(StorageFormat.Kivi4, StorageFormat.Q4_0);
            Check.True(other[0] == one[0] && other[1] != one[1], "other values");
        }

        private static ulong[] Identities(StorageFormat keys, StorageFormat values)
        {
            using (Engine engine = Blocks(keys, values))
            using (Step step = engine.Pool.BeginStep())
            {
                step.Append(engine.Pool.CreateSequence(), 1);
                step.Reserve();
                ExportedTables tables = step.Export(0, default);
                return new[] { tables.KeyIdentity, tables.ValueIdentity };
            }
        }
    }
}
