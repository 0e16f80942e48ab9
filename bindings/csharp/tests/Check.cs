// What tests say about values.
using System;
using System.Collections.Generic;
using System.Linq;

namespace Kvrt.Tests
{
    internal sealed class CheckException : Exception
    {
        public CheckException(string message) : base(message) { }
    }

    internal static class Check
    {
        public static void True(bool condition, string what)
        {
            if (!condition)
            {
                throw new CheckException(what);
            }
        }

        public static void Equal<T>(T expected, T actual, string what)
        {
            True(EqualityComparer<T>.Default.Equals(expected, actual),
                 $"{what}: {actual}, expected {expected}");
        }

        public static void SameElements<T>(
            IEnumerable<T> expected, IEnumerable<T> actual, string what)
        {
            True(expected.SequenceEqual(actual),
                 $"{what}: [{string.Join(", ", actual)}], " +
                 $"expected [{string.Join(", ", expected)}]");
        }

        public static void Contains(string part, string text, string what)
        {
            True(text.Contains(part), $"{what}: \"{text}\" does not contain \"{part}\"");
        }

        /// <summary>|actual - expected| at most tolerance * (1 + |expected|), element by element.
        /// </summary>
        public static void Close(double[] expected, double[] actual, double tolerance, string what)
        {
            Equal(expected.Length, actual.Length, what + ": length");
            for (int i = 0; i < expected.Length; ++i)
            {
                double error = Math.Abs(actual[i] - expected[i]);
                True(error <= tolerance * (1 + Math.Abs(expected[i])), // false for NaN
                     $"{what}: element {i} is {actual[i]:R}, expected {expected[i]:R}");
            }
        }

        public static T Throws<T>(Action action, string what) where T : Exception
        {
            try
            {
                action();
            }
            catch (T error)
            {
                return error;
            }
            catch (Exception error)
            {
                throw new CheckException($"{what}: {error.GetType().Name} ({error.Message}), " +
                                         $"expected {typeof(T).Name}");
            }
            throw new CheckException($"{what}: nothing was thrown, expected {typeof(T).Name}");
        }

        /// <summary>The error of the library, or of the binding before it, with this status and a
        /// message that says this.</summary>
        public static void Fails(Status status, string part, Action action)
        {
            KvrtException error = Throws<KvrtException>(action, part);
            Equal(status, error.Status, "status of: " + error.Message);
            Contains(part, error.Message, "message");
        }
    }
}
