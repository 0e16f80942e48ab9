// Numbers for tests: a fixed stream of values, conversions to and from half precision and bfloat16,
// and attention as the textbook has it, in double.
using System;
using System.Linq;

namespace Kvrt.Tests
{
    internal static class Numbers
    {
        /// <summary>Values in [-1, 1) that depend on the seed alone.</summary>
        public static float[] Stream(int count, uint seed)
        {
            uint state = seed * 2654435761u + 12345u;
            var values = new float[count];
            for (int i = 0; i < count; ++i)
            {
                state = state * 1664525u + 1013904223u;
                values[i] = (int)(state >> 8) / 8388608f - 1f;
            }
            return values;
        }

        /// <summary>The nearest value of half precision, ties to even. For magnitudes below 65520.
        /// </summary>
        public static ushort ToHalf(float value)
        {
            ushort sign = (ushort)(value < 0 ? 0x8000 : 0);
            double magnitude = Math.Abs((double)value);
            if (magnitude < 6.103515625e-05) // subnormal: multiples of 2^-24
            {
                return (ushort)(sign | (ushort)Math.Round(magnitude * 16777216.0));
            }
            int exponent = (int)Math.Floor(Math.Log(magnitude, 2.0));
            double scaled = magnitude / Math.Pow(2.0, exponent);
            if (scaled >= 2.0)
            {
                ++exponent;
                scaled /= 2.0;
            }
            else if (scaled < 1.0)
            {
                --exponent;
                scaled *= 2.0;
            }
            int mantissa = (int)Math.Round((scaled - 1.0) * 1024.0); // 1024 carries over
            return (ushort)(sign | (ushort)(((exponent + 15) << 10) + mantissa));
        }

        public static double FromHalf(ushort bits)
        {
            int exponent = bits >> 10 & 31;
            double mantissa = (bits & 1023) / 1024.0;
            double magnitude = exponent == 0 ? mantissa * Math.Pow(2.0, -14)
                                             : (1.0 + mantissa) * Math.Pow(2.0, exponent - 15);
            return (bits & 0x8000) != 0 ? -magnitude : magnitude;
        }

        /// <summary>The upper half of a float, ties to even.</summary>
        public static ushort ToBFloat16(float value)
        {
            uint bits = BitConverter.ToUInt32(BitConverter.GetBytes(value), 0);
            return (ushort)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
        }

        public static double FromBFloat16(ushort bits)
        {
            return BitConverter.ToSingle(BitConverter.GetBytes((uint)bits << 16), 0);
        }

        public static ushort[] ToBits(float[] values, DataType type)
        {
            return values
                .Select(value => type == DataType.Float16 ? ToHalf(value) : ToBFloat16(value))
                .ToArray();
        }

        public static double[] FromBits(ushort[] bits, DataType type)
        {
            return bits
                .Select(value => type == DataType.Float16 ? FromHalf(value) : FromBFloat16(value))
                .ToArray();
        }

        /// <summary>What a value becomes in a storage format.</summary>
        public static double Stored(double value, StorageFormat format)
        {
            switch (format)
            {
                case StorageFormat.Float32:
                    return (float)value;
                case StorageFormat.BFloat16:
                    return FromBFloat16(ToBFloat16((float)value));
                default:
                    return FromHalf(ToHalf((float)value));
            }
        }

        /// <summary>softmax(q . k / sqrt(dim)) v of one query head over `count` tokens.</summary>
        /// <param name="query">[dim]</param>
        /// <param name="key">The key of a token: [dim].</param>
        /// <param name="value">The value of a token: [dim].</param>
        /// <param name="tokens">The tokens that the query sees.</param>
        /// <param name="logSumExp">ln of the sum of exp(logit).</param>
        public static double[] Attend(
            double[] query, Func<int, double[]> key, Func<int, double[]> value, int[] tokens,
            out double logSumExp)
        {
            double[] logits = tokens
                .Select(token => Dot(query, key(token)) / Math.Sqrt(query.Length)).ToArray();
            double highest = logits.Max();
            double[] weights = logits.Select(logit => Math.Exp(logit - highest)).ToArray();
            double sum = weights.Sum();
            logSumExp = highest + Math.Log(sum);
            var result = new double[value(tokens[0]).Length];
            for (int i = 0; i < tokens.Length; ++i)
            {
                double[] row = value(tokens[i]);
                for (int d = 0; d < result.Length; ++d)
                {
                    result[d] += weights[i] / sum * row[d];
                }
            }
            return result;
        }

        private static double Dot(double[] left, double[] right)
        {
            return left.Zip(right, (l, r) => l * r).Sum();
        }
    }
}
